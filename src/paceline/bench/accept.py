"""Acceptance: how many tokens a drafter's verify steps emit, by group of prompts.

The protocol of every figure here: chat template, first turn, end-of-text honoured; tokens that
verify steps emitted (the first token of an answer comes from its prefill) over verify steps, so
accept length is weighted by tokens, the bonus token counts and 1.0 is the floor.

Beside sampled figures stands the target's entropy, without which they say little: the mean of
-log p over the tokens that it emitted at temperature 1 is an unbiased estimate of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.bench.run import (
    BenchEngine,
    Progress,
    Sample,
    Settings,
    Slice,
    Task,
    accept_length,
    run_one_way,
)
from paceline.bench.summary import ALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """One group of prompts, one drafter, one temperature."""

    group: str
    num_prompts: int
    num_tokens: int
    num_steps: int
    accept_length: float
    position_rates: tuple[float, ...]  # share of steps that accepted at least i + 1 drafts


def acceptance(
    engine: BenchEngine,
    tasks: Sequence[Task],
    settings: Settings,
    *,
    stop_ids: frozenset[int],
    progress: Progress = lambda done, total: None,  # noqa: ARG005
) -> list[Acceptance]:
    """Run every task with the engine's drafter; one summary per group, then one of all.

    Raises:
        RequestError: a prompt cannot be served.
        PacelineError: a request ended with an error.
    """
    done = run_one_way(engine, tasks, settings, "draft", stop_ids=stop_ids, progress=progress)
    return [_summary(group, samples) for group, samples in _by_group(done, tasks)]


def entropy(
    engine: BenchEngine,
    tasks: Sequence[Task],
    settings: Settings,
    *,
    stop_ids: frozenset[int],
    progress: Progress = lambda done, total: None,  # noqa: ARG005
) -> dict[str, float]:
    """The target's entropy per token at temperature 1, nats, by group and in all.

    Raises:
        RequestError: a prompt cannot be served.
        PacelineError: a request ended with an error.
    """
    plain = replace(settings, temperature=1.0)
    done = run_one_way(engine, tasks, plain, "baseline", stop_ids=stop_ids, progress=progress)
    found = {}
    for group, samples in _by_group(done, tasks):
        values = [-p.logprob for s in samples for p in s.logprobs]
        found[group] = sum(values) / max(len(values), 1)
    return found


def _by_group(done: Slice, tasks: Sequence[Task]) -> Iterable[tuple[str, list[Sample]]]:
    for group in dict.fromkeys(task.group for task in tasks):
        yield group, [s for s in done.samples if tasks[s.task].group == group]
    yield ALL, list(done.samples)


def _summary(group: str, samples: list[Sample]) -> Acceptance:
    counts: list[int] = []
    for sample in samples:
        for accepted, times in enumerate(sample.stats.accept_histogram):
            counts += [0] * (accepted + 1 - len(counts))
            counts[accepted] += times
    total = max(sum(counts), 1)
    return Acceptance(
        group=group,
        num_prompts=len(samples),
        num_tokens=sum(len(s.token_ids) - 1 for s in samples),
        num_steps=sum(s.stats.num_steps for s in samples),
        accept_length=accept_length(samples),
        position_rates=tuple(sum(counts[i:]) / total for i in range(1, len(counts))),
    )
