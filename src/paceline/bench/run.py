"""Runs prompts through an engine twice: with its drafter, and autoregressively, side by side.

Both ways share one engine, hence one set of weights, one pool and one process: a request with
`num_speculative_tokens=0` is plain decoding. The two take turns prompt by prompt (slice by slice if
several requests run at once) and change who goes first, so that a machine's drift cancels out.

A drafter that learns from past outputs must not see the answers beforehand: every (way, repeat)
has a scope of its own, so what the baseline or an earlier repeat said is unknown to the drafter.
Within a repeat it may learn from one prompt for the next, as in service, unless history is "none".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from paceline.core.errors import PacelineError
from paceline.core.request import (
    FinishReason,
    Request,
    RequestStats,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)

Way = Literal["baseline", "draft"]
WAYS: tuple[Way, Way] = ("baseline", "draft")
_SLICE = 4  # prompts per place in a slice of concurrent requests


class BenchEngine(Protocol):
    """The part of `Engine` that a run drives."""

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do anything."""
        ...

    def add(self, request: Request) -> int:
        """Queue a request."""
        ...

    def step(self) -> list[StepOutput]:
        """Compute one step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt as token ids."""

    key: str
    group: str
    prompt_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a workload is run."""

    max_tokens: int = field(default=128, metadata={"help": "output tokens per prompt, at most"})
    temperature: float = field(default=0.0, metadata={"help": "sampling temperature"})
    seed: int = field(default=0, metadata={"help": "seed of the first prompt; the others follow"})
    repeats: int = field(default=1, metadata={"help": "runs of the whole workload"})
    warmup: int = field(default=1, metadata={"help": "prompts run beforehand and not counted"})
    concurrency: int = field(default=1, metadata={"help": "requests decoded at the same time"})
    ignore_eos: bool = field(
        default=False, metadata={"help": "go on after end-of-text; inflates accept length"}
    )
    history: Literal["shared", "none"] = field(
        default="shared",
        metadata={"help": "whether a drafter may learn from the prompts before, as in service"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer."""

    task: int  # index
    repeat: int
    way: Way
    token_ids: tuple[int, ...]
    stats: RequestStats
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Prompts that ran together, one way; `seconds` is wall time."""

    tasks: tuple[int, ...]
    repeat: int
    way: Way
    seconds: float
    samples: tuple[Sample, ...]


Progress = Callable[[int, int], None]  # (answers made, answers in all)


def accept_length(samples: Iterable[Sample]) -> float:
    """Tokens that verify steps emitted over verify steps, bonus included; 1.0 without any.

    The first token of an answer comes from its prefill and is not one of them.
    """
    emitted = steps = 0
    for sample in samples:
        emitted += len(sample.token_ids) - 1
        steps += sample.stats.num_steps
    return emitted / steps if steps else 1.0


def run(
    engine: BenchEngine,
    tasks: Sequence[Task],
    settings: Settings,
    *,
    stop_ids: frozenset[int],
    progress: Progress = lambda done, total: None,  # noqa: ARG005
    baseline_logprobs: int | None = None,
) -> list[Slice]:
    """Run every task both ways, `settings.repeats` times.

    Args:
        engine: idle, with the drafter to be measured.
        tasks: what to answer.
        settings: how.
        stop_ids: end-of-text ids.
        progress: told after each answer.
        baseline_logprobs: ask the baseline for this many log-probabilities per token.

    Raises:
        RequestError: a prompt cannot be served.
        PacelineError: a request ended with an error.
    """
    runner = _Runner(engine, tasks, settings, stop_ids, baseline_logprobs, progress)
    warm = min(settings.warmup, len(tasks))
    for way in WAYS:
        runner.run_slice(list(range(warm)), -1, way)
    runner.done = 0
    width = 1 if settings.concurrency == 1 else settings.concurrency * _SLICE
    slices = []
    for repeat in range(settings.repeats):
        for start in range(0, len(tasks), width):
            indices = list(range(start, min(start + width, len(tasks))))
            turn = repeat + start // width
            for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
                slices.append(runner.run_slice(indices, repeat, way))  # noqa: PERF401
    return slices


def run_one_way(
    engine: BenchEngine,
    tasks: Sequence[Task],
    settings: Settings,
    way: Way,
    *,
    stop_ids: frozenset[int],
    progress: Progress = lambda done, total: None,  # noqa: ARG005
    turn: int = 0,
    baseline_logprobs: int = 0,
) -> Slice:
    """Run every task once, one way: for acceptance, which needs no baseline beside it.

    Args:
        engine: idle.
        tasks: what to answer.
        settings: how.
        way: with the engine's drafter or without.
        stop_ids: end-of-text ids.
        progress: told after each answer.
        turn: another one finds nothing cached and nothing learned of those before.
        baseline_logprobs: ask the baseline for this many log-probabilities per token.

    Raises:
        RequestError: a prompt cannot be served.
        PacelineError: a request ended with an error.
    """
    runner = _Runner(engine, tasks, settings, stop_ids, baseline_logprobs, progress)
    return runner.run_slice(list(range(len(tasks))), turn, way)


@dataclass(slots=True)
class _Runner:
    engine: BenchEngine
    tasks: Sequence[Task]
    settings: Settings
    stop_ids: frozenset[int]
    baseline_logprobs: int | None
    progress: Progress
    done: int = 0

    def run_slice(self, indices: list[int], repeat: int, way: Way) -> Slice:
        """Answer these tasks one way, at most `concurrency` at the same time."""
        waiting = indices[::-1]
        running: dict[str, int] = {}
        outputs: dict[str, list[StepOutput]] = {}
        samples: list[Sample] = []
        total = 2 * self.settings.repeats * len(self.tasks)
        started = time.perf_counter()
        while waiting or running:
            while waiting and len(running) < self.settings.concurrency:
                index = waiting.pop()
                request = self._request(index, repeat, way)
                self.engine.add(request)
                running[request.id] = index
                outputs[request.id] = []
            for output in self.engine.step():
                outputs[output.request_id].append(output)
                if output.finish_reason is None:
                    continue
                index = running.pop(output.request_id)
                samples.append(self._sample(outputs[output.request_id], index, repeat, way))
                self.done += repeat >= 0
                self.progress(self.done, total)
        seconds = time.perf_counter() - started
        return Slice(
            tasks=tuple(indices),
            repeat=repeat,
            way=way,
            seconds=seconds,
            samples=tuple(sorted(samples, key=lambda s: s.task)),
        )

    def _request(self, index: int, repeat: int, way: Way) -> Request:
        settings = self.settings
        scope = f"bench/{way}/{repeat}"
        if settings.history == "none":
            scope += f"/{index}"
        params = SamplingParams(
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            seed=settings.seed + index,
            ignore_eos=settings.ignore_eos,
            num_speculative_tokens=0 if way == "baseline" else None,
            logprobs=self.baseline_logprobs if way == "baseline" else None,
        )
        return Request(
            id=f"{scope}/{index}",
            prompt_ids=self.tasks[index].prompt_ids,
            params=params,
            stop_ids=frozenset() if settings.ignore_eos else self.stop_ids,
            scope=scope,
        )

    def _sample(self, outputs: list[StepOutput], index: int, repeat: int, way: Way) -> Sample:
        last = outputs[-1]
        if last.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            msg = f"prompt {self.tasks[index].key} ended early: {last.error or 'aborted'}"
            raise PacelineError(msg)
        assert last.stats is not None, "the last output carries the statistics"
        return Sample(
            task=index,
            repeat=repeat,
            way=way,
            token_ids=tuple(t for o in outputs for t in o.token_ids),
            stats=last.stats,
            logprobs=tuple(p for o in outputs for p in o.logprobs or ()),
        )
