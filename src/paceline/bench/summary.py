"""Summary: what the slices of a run say, per group and in all. Plain arithmetic, no output.

Accept length is token-weighted: tokens that verify steps emitted (the first token of an answer
comes from its prefill) over verify steps, so the bonus token counts and 1.0 is the floor.
Speeds are output tokens over wall time, prefill included; `decode` speeds leave the prefill out.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.run import Sample, Slice, Task, Way, accept_length

ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """Figures of one group of prompts. Ratios are draft over baseline."""

    group: str
    num_prompts: int
    num_tokens: int  # output tokens of the drafted answers, over all repeats
    num_steps: int  # verify steps of the drafted answers
    accept_length: float
    accept_length_mean: float  # mean over answers
    accept_rate: float | None  # accepted / verified draft nodes; None: nothing was drafted
    position_rates: tuple[float, ...]  # share of steps that accepted at least i + 1 tokens
    drafts_per_step: float
    tokens_per_second: float
    baseline_tokens_per_second: float
    speed_ratio: float  # median over repeats
    speed_ratio_range: tuple[float, float]
    decode_ratio: float  # of seconds per token after the first
    num_equal: int  # answers whose tokens equal the baseline's
    num_compared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An answer whose tokens differ from the baseline's."""

    task: int
    repeat: int
    baseline: Sample
    draft: Sample
    index: int  # first output token that differs


def summarise(slices: Sequence[Slice], tasks: Sequence[Task]) -> list[GroupSummary]:
    """One summary per group, in order of first appearance, then one of everything."""
    groups = list(dict.fromkeys(task.group for task in tasks))
    found = [
        _summary(group, slices, {i for i, task in enumerate(tasks) if task.group == group})
        for group in groups
    ]
    return [*found, _summary(ALL, slices, set(range(len(tasks))))]


def differences(slices: Sequence[Slice]) -> list[Difference]:
    """Every drafted answer that is not the baseline's, in order of repeats, then tasks."""
    samples = _samples(slices)
    found = []
    for (repeat, task), ways in sorted(samples.items()):
        one, other = ways["baseline"], ways["draft"]
        if one.token_ids == other.token_ids:
            continue
        same = common_length(one.token_ids, other.token_ids)
        found.append(Difference(task=task, repeat=repeat, baseline=one, draft=other, index=same))
    return found


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two answers begin with alike: where they part, or the shorter one's end."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _samples(slices: Sequence[Slice]) -> dict[tuple[int, int], dict[Way, Sample]]:
    found: dict[tuple[int, int], dict[Way, Sample]] = defaultdict(dict)
    for piece in slices:
        for sample in piece.samples:
            found[piece.repeat, sample.task][piece.way] = sample
    return found


def _summary(group: str, slices: Sequence[Slice], tasks: set[int]) -> GroupSummary:
    samples = [s for piece in slices for s in piece.samples if s.task in tasks]
    drafted = [s for s in samples if s.way == "draft"]
    steps = sum(s.stats.num_steps for s in drafted)
    nodes = sum(s.stats.num_drafted for s in drafted)
    accepted = sum(s.stats.num_accepted for s in drafted)
    ratios = _speed_ratios(slices, tasks)
    pairs = [w for (_, task), w in _samples(slices).items() if task in tasks]
    return GroupSummary(
        group=group,
        num_prompts=len(tasks),
        num_tokens=sum(len(s.token_ids) for s in drafted),
        num_steps=steps,
        accept_length=accept_length(drafted),
        accept_length_mean=statistics.fmean(accept_length([s]) for s in drafted),
        accept_rate=accepted / nodes if nodes else None,
        position_rates=_position_rates(drafted),
        drafts_per_step=nodes / steps if steps else 0.0,
        tokens_per_second=_speed(slices, tasks, "draft"),
        baseline_tokens_per_second=_speed(slices, tasks, "baseline"),
        speed_ratio=statistics.median(ratios),
        speed_ratio_range=(min(ratios), max(ratios)),
        decode_ratio=_ratio(_decode_speed(drafted), _decode_speed(samples, "baseline")),
        num_equal=sum(w["baseline"].token_ids == w["draft"].token_ids for w in pairs),
        num_compared=len(pairs),
    )


def _position_rates(samples: Sequence[Sample]) -> tuple[float, ...]:
    counts: list[int] = []
    for sample in samples:
        for accepted, steps in enumerate(sample.stats.accept_histogram):
            counts += [0] * (accepted + 1 - len(counts))
            counts[accepted] += steps
    total = sum(counts)
    return tuple(sum(counts[i:]) / total for i in range(1, len(counts))) if total else ()


def _speed(slices: Sequence[Slice], tasks: set[int], way: Way, repeat: int | None = None) -> float:
    """Output tokens per second of wall time.

    A slice that mixes groups counts for each with its share of the slice's tokens, so only whole
    slices are told apart in speed; at one request at a time a slice is one prompt.
    """
    tokens = seconds = 0.0
    for piece in slices:
        if piece.way != way or (repeat is not None and piece.repeat != repeat):
            continue
        all_tokens = sum(len(s.token_ids) for s in piece.samples)
        own = sum(len(s.token_ids) for s in piece.samples if s.task in tasks)
        tokens += own
        seconds += piece.seconds * own / all_tokens if all_tokens else 0.0
    return tokens / seconds if seconds else 0.0


def _speed_ratios(slices: Sequence[Slice], tasks: set[int]) -> list[float]:
    repeats = sorted({piece.repeat for piece in slices})
    return [
        _ratio(_speed(slices, tasks, "draft", r), _speed(slices, tasks, "baseline", r))
        for r in repeats
    ]


def _decode_speed(samples: Sequence[Sample], way: Way = "draft") -> float:
    mine = [s for s in samples if s.way == way]
    seconds = sum(s.stats.decode_s for s in mine)
    return sum(len(s.token_ids) - 1 for s in mine) / seconds if seconds else 0.0


def _ratio(one: float, other: float) -> float:
    return one / other if other else 1.0
