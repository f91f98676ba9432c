"""Waves of requests at a stated concurrency: they join, end, are aborted and preempted; no tests here."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.request import FinishReason, SamplingParams
from paceline.engine.engine import Engine
from tests.engine.harness import request

PLAIN: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}]
RARE: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_k": 9},
    {"temperature": 1.0, "frequency_penalty": 0.5},  # needs one of a few slots
]
LONGEST = 64  # tokens of a request, prompt and answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that is yet to be sent."""

    name: str
    prompt: list[int]
    params: SamplingParams


@dataclass(slots=True)
class Said:
    """What requests emitted."""

    finished: dict[str, list[int]] = field(default_factory=dict)
    aborted: dict[str, list[int]] = field(default_factory=dict)
    most_running: int = 0

    def check(self, expected: Mapping[str, list[int]]) -> None:
        """Finished requests said what was expected; aborted ones the beginning of it."""
        assert self.finished == {name: expected[name] for name in self.finished}
        for name, tokens in self.aborted.items():
            assert tokens == expected[name][: len(tokens)], name


def jobs_of(rng: random.Random, count: int, *, rare: float = 0.05) -> list[Job]:
    """Prompts that repeat themselves; greedy or sampled, a share of them with further options."""
    made = []
    for i in range(count):
        base = [rng.randrange(3, 12) for _ in range(rng.randrange(1, 6))]
        prompt = (base * 9)[: rng.randrange(1, 34)]
        own = rng.choice(RARE if rng.random() < rare else PLAIN)
        params = SamplingParams(max_tokens=rng.randrange(4, 30), seed=rng.randrange(5), **own)
        made.append(Job(name=f"r{i}", prompt=prompt, params=params))
    return made


def serve(
    eng: Engine,
    jobs: Sequence[Job],
    concurrency: int,
    rng: random.Random,
    *,
    aborts: float = 0.05,
    at_once: bool = False,
) -> Said:
    """Send jobs, so many at a time, until all have ended; integrity is checked now and then.

    Args:
        eng: an engine at rest.
        jobs: each is sent once.
        concurrency: most requests in the engine, waiting ones included.
        rng: decides who joins and who is aborted.
        aborts: how often somebody is aborted, a step.
        at_once: fill up to the concurrency in one step, not bit by bit.
    """
    said, todo = Said(), list(reversed(jobs))
    got: dict[str, list[int]] = {}
    steps = 0
    while todo or eng.has_work:
        joining = concurrency - len(got)
        if not at_once:
            joining = min(joining, rng.randrange(1 + concurrency // 2) + 1)
        for job in [todo.pop() for _ in range(min(joining, len(todo)))]:
            got[job.name] = []
            eng.add(request(job.name, job.prompt, job.params))
        if got and rng.random() < aborts:
            eng.abort(rng.choice(list(got)))
        for out in eng.step():
            got[out.request_id] += out.token_ids
            if out.finish_reason is not None:
                ended = said.aborted if out.finish_reason is FinishReason.ABORT else said.finished
                ended[out.request_id] = got.pop(out.request_id)
        said.most_running = max(said.most_running, eng.num_running)
        steps += 1
        if steps % 16 == 0:
            eng.check_integrity()
    eng.check_integrity()
    assert eng.num_running == eng.num_waiting == 0
    assert len(said.finished) + len(said.aborted) == len(jobs)
    return said


def endless(eng: Engine, steps: int, concurrency: int, rng: random.Random, first: int) -> int:
    """Step on and on under changing load, with aborts; returns how many requests were sent in all.

    Args:
        eng: may hold requests of an earlier call.
        steps: to be made.
        concurrency: most requests in the engine.
        rng: decides everything.
        first: number of the first request.
    """
    sent = first
    for _ in range(steps):
        wanted = rng.randrange(1, concurrency + 1)
        while eng.num_running + eng.num_waiting < wanted:
            params = SamplingParams(
                max_tokens=rng.randrange(1, 40),
                ignore_eos=True,
                temperature=float(rng.randrange(2)),
                seed=sent % 7,
            )
            prompt = [rng.randrange(3, 12) for _ in range(rng.randrange(1, 24))]
            eng.add(request(f"r{sent}", prompt, params))
            sent += 1
        if rng.random() < 0.02:
            eng.abort(f"r{rng.randrange(max(0, sent - concurrency), sent)}")
        eng.step()
    return sent
