"""Builds engines on tiny checkpoints and runs requests through them; no tests here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.config import CacheConfig, DraftConfig, EngineConfig
from paceline.core.request import Request, SamplingParams, StepOutput
from paceline.engine.engine import Engine
from tests.engine.inspected import build_inspected

STOP_ID = 2  # the tiny checkpoints' end-of-text id


def engine(
    folder: Path, build: Callable[[EngineConfig], Engine] = build_inspected, **options: object
) -> Engine:
    """An engine in float64 on the CPU; `options` go to whichever config part has the field.

    Every tree and every pass of it is checked (`inspected.py`), which waits for the device; `build`
    may be `Engine.build` where nothing may wait.
    """
    cache = {"page_size": 4, "max_rows": 4, "max_len": 160}
    draft: dict[str, object] = {"adaptive": False, "num_speculative_tokens": 8}
    top: dict[str, object] = {
        "dtype": "float64",
        "device": "cpu",
        "seed": 0,
        "threads": 1,
        "graphs": "on-demand",
    }
    for key, value in options.items():
        for part, kind in ((cache, CacheConfig), (draft, DraftConfig), (top, EngineConfig)):
            if key in kind.__dataclass_fields__:
                part[key] = value
                break
        else:
            raise TypeError(key)
    return build(
        EngineConfig(
            model=str(folder), cache=CacheConfig(**cache), draft=DraftConfig(**draft), **top
        )
    )


def request(name: str, prompt: Sequence[int], params: SamplingParams, **extra: object) -> Request:
    """A request that ends at the tiny checkpoints' end-of-text id unless told to ignore it."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {STOP_ID})
    return Request(
        id=name, prompt_ids=tuple(prompt), params=params, stop_ids=frozenset(stops), **extra
    )


@dataclass(slots=True)
class Outcome:
    """What a request emitted in all."""

    tokens: list[int]
    outputs: list[StepOutput]

    @property
    def last(self) -> StepOutput:
        """The output that carries the finish reason."""
        return self.outputs[-1]


def run(
    eng: Engine,
    requests: Sequence[Request],
    *,
    on_step: Callable[[int], None] | None = None,
    max_steps: int = 5_000,
) -> dict[str, Outcome]:
    """Add all requests, step until idle, check integrity after each step."""
    for item in requests:
        eng.add(item)
    done: dict[str, Outcome] = {}
    for index in range(max_steps):
        if not eng.has_work:
            return done
        if on_step is not None:
            on_step(index)
        for out in eng.step():
            entry = done.setdefault(out.request_id, Outcome([], []))
            entry.tokens += out.token_ids
            entry.outputs.append(out)
        eng.check_integrity()
    msg = "the engine did not come to rest"
    raise AssertionError(msg)
