"""Costs of single steps on this CPU: a verify of 8 nodes over one of 1, and the host's share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from paceline import models
from paceline.bench.run import Task
from paceline.core.config import CacheConfig, DraftConfig, EngineConfig
from paceline.core.request import Request, SamplingParams
from paceline.core.tree import Proposal
from paceline.draft.base import DrafterSpec, HostCommit
from paceline.engine.engine import Engine
from paceline.engine.proposers import HostProposer

TOKENS = 64  # new tokens per answer in comparisons of speed
Row = dict[str, object]


def config(method: str, **values: object) -> EngineConfig:
    """bf16, default settings, room for eight sequences of 2,048 tokens."""
    return EngineConfig(
        **{"dtype": "bfloat16", "weights": "bf16", "seed": 0, **values},  # type: ignore[arg-type]
        cache=CacheConfig(max_rows=8, max_len=2048),
        draft=DraftConfig(method=method),
    )


def row(name: str, value: float, unit: str, bar: float, *, baseline: object, low: bool) -> Row:
    """One line of the record; `low`: smaller is better."""
    ok = value <= bar if low else value >= bar
    print(f"{name:22} {value:9.3f} {unit:14} bar {bar:g} {'ok' if ok else 'MISSED'}", flush=True)
    return {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "baseline": baseline,
        "bar": bar,
        "ok": ok,
    }


class FixedDrafter:
    """Proposes the same chain of `length` tokens in every step: what a verify costs, not gains."""

    def __init__(self) -> None:
        self.spec = DrafterSpec(name="fixed", max_nodes=16, max_depth=15, on_host=True)
        self.length = 0

    def join(self, row: int, tokens: Sequence[int], num_prompt: int, scope: str) -> None:
        """Nothing is kept."""

    def observe(self, commit: HostCommit) -> None:
        """Nothing is kept."""

    def propose(self, rows: Sequence[int], budgets: Sequence[int]) -> Sequence[Proposal]:  # noqa: ARG002
        """A chain of rare tokens."""
        n = self.length
        chain = Proposal(
            tokens=range(40_000, 40_000 + n), parents=range(-1, n - 1), scores=[-1.0] * n
        )
        return [chain] * len(rows)

    def leave(self, row: int, *, keep: bool) -> None:
        """Nothing was kept."""


def verify8(loaded: models.LoadedModel, tasks: Sequence[Task]) -> Row:
    """Time of a step of 8 nodes over a step of 1, alternating step by step."""
    fixed = config("ngram")
    engine = Engine.build(replace(fixed, draft=replace(fixed.draft, adaptive=False)), loaded=loaded)
    drafter = FixedDrafter()
    engine._launcher._proposer = HostProposer(drafter)  # noqa: SLF001 (a drafter of our own)
    times: dict[int, list[float]] = {0: [], 7: []}
    for task in tasks[:5]:
        params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
        engine.add(Request(id="v", prompt_ids=tuple(task.prompt_ids), params=params))
        count = 0
        while engine.has_work:
            drafter.length = 7 * (count % 2)
            start = time.perf_counter()
            outs = engine.step()
            if outs and count > 3:
                times[drafter.length].append(time.perf_counter() - start)
            count += 1
    one = statistics.median(times[0])
    return row(
        "verify8",
        statistics.median(times[7]) / one,
        "x one node",
        1.35,
        baseline={"one_node_ms": round(1e3 * one, 2)},
        low=True,
    )


class Clock:
    """A `Stages` that sums seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the stage `name`."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def host_share(loaded: models.LoadedModel, tasks: Sequence[Task]) -> Row:
    """Everything of a BLOCK step but the target's pass and the pick, at one sequence, suffix."""
    clock = Clock()
    engine = Engine.build(config("suffix"), loaded=loaded, stages=clock)
    total = steps = 0.0
    for task in tasks:
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        engine.add(Request(id="h", prompt_ids=tuple(task.prompt_ids), params=params))
        first = True
        while engine.has_work:
            start = time.perf_counter()
            outs = engine.step()
            if outs and not first:
                total += time.perf_counter() - start
                steps += 1
            first = first and not outs
    device = clock.seconds["verify"] + clock.seconds["walk"]
    return row(
        "host_share",
        1.0 - device / total,
        "of a step",
        0.10,
        baseline={"step_ms": round(1e3 * total / steps, 2)},
        low=True,
    )


def draft_step(loaded: models.LoadedModel, tasks: Sequence[Task]) -> Row:
    """DFlash's propose and observe over a whole plain step, prompts in turns, one sequence."""
    clock = Clock()
    plain = Engine.build(config("none"), loaded=loaded)
    fixed = config("dflash")
    drafted = Engine.build(
        replace(fixed, draft=replace(fixed.draft, adaptive=False)), loaded=loaded, stages=clock
    )
    ones, ratios = [], []
    for task in tasks:
        one = statistics.median(_steps(plain, task, 40))
        clock.seconds.clear()
        count = len(_steps(drafted, task, 40))
        mine = (clock.seconds["propose"] + clock.seconds["observe"]) / count
        ones.append(round(1e3 * one, 2))
        ratios.append(mine / one)
    return row(
        "draft_step",
        statistics.median(ratios),
        "x one node",
        0.35,
        baseline={"one_node_ms": ones},
        low=True,
    )


def _steps(engine: Engine, task: Task, num_tokens: int) -> list[float]:
    """Seconds of each BLOCK step of an answer."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    engine.add(Request(id="d", prompt_ids=tuple(task.prompt_ids), params=params))
    seconds = []
    while engine.has_work:
        before = engine.counters.num_block_steps
        start = time.perf_counter()
        engine.step()
        if engine.counters.num_block_steps > before:
            seconds.append(time.perf_counter() - start)
    return seconds
