"""The lossless check: are a drafter's tokens the autoregressive tokens?

Where they are not, the first difference is shown with the gap between the two best logits there: a
tiny gap means that rounding flipped the choice, a large one means a fault. (Log-probabilities and
logits of one place differ by a constant, so their gaps are equal.) Above temperature 0 the choice is
among logits with noise added, so rounding can also flip one whose gap without noise is large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from paceline.bench.machine import Json
from paceline.bench.report import describe, header
from paceline.bench.run import accept_length
from paceline.bench.summary import Difference, differences

if TYPE_CHECKING:
    from paceline.bench.run import Settings, Slice, Task
    from paceline.bench.workload import Workload
    from paceline.core.config import EngineConfig

SCHEMA = "paceline-lossless/1"
TOP_LOGPROBS = 2  # what the baseline is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """Where a drafted answer left the autoregressive one."""

    prompt: str
    index: int  # output token
    baseline_token: int | None  # None: the answer had ended
    draft_token: int | None
    logit_gap: float | None  # between the two best tokens there; None: no log-probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome for one drafter at one temperature."""

    spec: str
    temperature: float
    num_prompts: int
    num_tokens: int  # of the autoregressive answers
    num_equal: int
    accept_length: float
    differences: tuple[FirstDifference, ...]

    @property
    def equal(self) -> bool:
        """Whether every answer is the same."""
        return self.num_equal == self.num_prompts


def judge(spec: str, temperature: float, tasks: Sequence[Task], slices: Sequence[Slice]) -> Verdict:
    """Compare the two ways of one run (made with `baseline_logprobs=TOP_LOGPROBS`)."""
    drafted = [s for piece in slices if piece.way == "draft" for s in piece.samples]
    plain = [s for piece in slices if piece.way == "baseline" for s in piece.samples]
    wrong = differences(slices)
    return Verdict(
        spec=spec,
        temperature=temperature,
        num_prompts=len(plain),
        num_tokens=sum(len(s.token_ids) for s in plain),
        num_equal=len(plain) - len(wrong),
        accept_length=accept_length(drafted),
        differences=tuple(_first(d, tasks) for d in wrong),
    )


def _first(difference: Difference, tasks: Sequence[Task]) -> FirstDifference:
    one, other, index = difference.baseline, difference.draft, difference.index
    gap = None
    if index < len(one.logprobs) and len(one.logprobs[index].top_logprobs) >= 2:
        best, second = one.logprobs[index].top_logprobs[:2]
        gap = best - second
    return FirstDifference(
        prompt=tasks[difference.task].key,
        index=index,
        baseline_token=one.token_ids[index] if index < len(one.token_ids) else None,
        draft_token=other.token_ids[index] if index < len(other.token_ids) else None,
        logit_gap=gap,
    )


def record(
    verdicts: Sequence[Verdict],
    workload: Workload,
    settings: Settings,
    config: EngineConfig,
    *,
    command: Sequence[str],
) -> dict[str, Json]:
    """The record of a lossless check."""
    return {
        **header(SCHEMA, command, config),
        "workload": describe(workload),
        "settings": {"max_tokens": settings.max_tokens, "seed": settings.seed},
        "equal": all(v.equal for v in verdicts),
        "results": [_plain_verdict(v) for v in verdicts],
    }


def _plain_verdict(verdict: Verdict) -> Json:
    return {
        "spec": verdict.spec,
        "temperature": verdict.temperature,
        "num_prompts": verdict.num_prompts,
        "num_tokens": verdict.num_tokens,
        "num_equal": verdict.num_equal,
        "accept_length": round(verdict.accept_length, 4),
        "differences": [asdict(d) for d in verdict.differences],
    }
