"""Figures of a run, under the keys of vLLM's result files, so that tools for those read ours.

TTFT: request sent to first content. TPOT: (E2E - TTFT) / (output tokens - 1), tokens by the server's
`usage`. E2E: request sent to the last chunk of the answer. `itl` is vLLM's key for the gap between
chunks with content, which is no time per token where a chunk holds several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypeAlias

import numpy as np

from paceline.bench.serve_client import Answer
from paceline.bench.serve_run import ServeRun, completed

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
PERCENTILES = (50, 90, 95, 99)
METRICS = ("ttft", "tpot", "itl", "e2el")
_MOST_MESSAGES = 3  # of each kind of failure


def values(answers: Sequence[Answer], metric: str) -> list[float]:
    """A metric's values in seconds, of the answers that have it."""
    if metric == "itl":
        return list(chain.from_iterable(a.gaps for a in answers))
    found = {
        "ttft": [a.ttft for a in answers],
        "tpot": [a.tpot for a in answers],
        "e2el": [a.e2e for a in answers],
    }[metric]
    return [value for value in found if value is not None]


def summarise(
    run: ServeRun, goodput: Mapping[str, float], *, detailed: bool = False
) -> dict[str, Json]:
    """All figures of one run; what could not be measured is null.

    Args:
        run: what was measured.
        goodput: most milliseconds of each metric for a request to count as good; empty: not asked.
        detailed: also the figures of every request, in order; null where there is none.
    """
    good, measured, load = completed(run), run.measured, run.load
    inputs = _sum([a.prompt_tokens for a in good])
    outputs = _sum([a.output_tokens for a in good])
    seconds = measured.seconds
    made: dict[str, Json] = {
        "variant": run.variant,
        "repeat": run.repeat,
        "max_concurrency": load.concurrency,
        "request_rate": _rate(load.rate),
        "burstiness": load.burstiness,
        "num_prompts": len(measured.answers),
        "duration": seconds,
        "completed": len(good),
        "failed": len(measured.answers) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": _sum([a.cached_tokens for a in good]),
        "request_throughput": len(good) / seconds,
        "output_throughput": None if outputs is None else outputs / seconds,
        "total_token_throughput": None
        if inputs is None or outputs is None
        else (inputs + outputs) / seconds,
        "max_concurrent_requests": measured.most_at_once,
        "answers_without_usage": sum(a.output_tokens is None for a in good),
        "answers_without_content": sum(a.ttft is None for a in good),
        "failures": failures(measured.answers),
        "finish_reasons": dict(Counter(str(a.finish_reason) for a in good)),
    }
    if goodput:
        made["request_goodput"] = sum(_is_good(a, goodput) for a in good) / seconds
    for metric in METRICS:
        made |= _statistics(values(good, metric), metric)
    made |= _speculation(run, good)
    made["groups"] = _groups(run)
    made["client"] = {
        "processor_share": measured.client_share,
        "lag_p99_ms": _ms(np.percentile(measured.client_lag, 99)) if measured.client_lag else None,
        "sent_late_ms": _ms(measured.sent_late),
    }
    return made | _detailed(measured.answers) if detailed else made


def failures(answers: Sequence[Answer]) -> dict[str, Json]:
    """Kind of failure -> how many, and the first few different messages."""
    found: dict[str, Json] = {}
    failed = [a.failure for a in answers if a.failure is not None]
    for kind, count in Counter(f.kind for f in failed).most_common():
        messages = list(dict.fromkeys(f.message for f in failed if f.kind == kind))
        found[kind] = {"count": count, "messages": list[Json](messages[:_MOST_MESSAGES])}
    return found


def accept_length(answers: Sequence[Answer]) -> float | None:
    """By what the answers themselves say: 1 + accepted / steps, all steps pooled; None: they don't."""
    told = [a.speculation for a in answers if a.speculation is not None]
    steps = sum(s.num_steps or 0 for s in told)
    if not steps:
        return None
    return 1 + sum(s.num_accepted for s in told if s.num_steps is not None) / steps


def _speculation(run: ServeRun, good: Sequence[Answer]) -> dict[str, Json]:
    made: dict[str, Json] = {}
    counted = run.counters
    if counted is not None and counted.num_drafts:
        made |= {
            "spec_decode_acceptance_rate": _percent(counted.acceptance_rate),
            "spec_decode_acceptance_length": counted.accept_length,
            "spec_decode_num_drafts": counted.num_drafts,
            "spec_decode_draft_tokens": counted.num_draft_tokens,
            "spec_decode_accepted_tokens": counted.num_accepted_tokens,
            "spec_decode_per_position_acceptance_rates": list[Json](counted.position_rates),
            "spec_decode_counters": counted.prefix,
            "spec_decode_contradiction": counted.contradiction(),
        }
    lengths = [
        a.speculation.accept_length
        for a in good
        if a.speculation is not None and a.speculation.accept_length is not None
    ]
    if lengths:
        made["answers_acceptance_length"] = accept_length(good)
        made["answers_acceptance_length_mean"] = sum(lengths) / len(lengths)
    return made


def _groups(run: ServeRun) -> list[Json]:
    """The run by group of its prompts."""
    piles: dict[str, list[Answer]] = {}
    for call, answer in zip(run.calls, run.measured.answers, strict=True):
        piles.setdefault(call.group, []).append(answer)
    made: list[Json] = []
    for group, pile in piles.items():
        good = [a for a in pile if a.failure is None]
        tpots = values(good, "tpot")
        made.append(
            {
                "group": group,
                "completed": len(good),
                "failed": len(pile) - len(good),
                "total_output_tokens": _sum([a.output_tokens for a in good]),
                "mean_tpot_ms": _ms(np.mean(tpots)) if tpots else None,
                "acceptance_length": accept_length(good),
            }
        )
    return made


def _detailed(answers: Sequence[Answer]) -> dict[str, Json]:
    start = min((a.started for a in answers), default=0.0)
    return {
        "input_lens": [a.prompt_tokens for a in answers],
        "output_lens": [a.output_tokens for a in answers],
        "start_times": [a.started - start for a in answers],
        "ttfts": [a.ttft for a in answers],
        "itls": [list[Json](a.gaps) for a in answers],
        "e2els": [a.e2e for a in answers],
        "generated_texts": [a.reasoning + a.text for a in answers],
        "errors": [f"{a.failure.kind}: {a.failure.message}" if a.failure else "" for a in answers],
    }


def _statistics(seconds: Sequence[float], metric: str) -> dict[str, Json]:
    """Mean, median, standard deviation (of these, not of a population) and percentiles."""
    found: dict[str, Json] = {
        f"{name}_{metric}_ms": _ms(function(seconds)) if seconds else None
        for name, function in (("mean", np.mean), ("median", np.median), ("std", np.std))
    }
    for p in PERCENTILES:
        found[f"p{p}_{metric}_ms"] = _ms(np.percentile(seconds, p)) if seconds else None
    return found


def _is_good(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Whether every limit holds. A single token has no time per token; an unknown number fails."""
    tpot = 0.0 if answer.output_tokens in {0, 1} else answer.tpot
    found = {"ttft": answer.ttft, "tpot": tpot, "e2el": answer.e2e}
    return all(
        value is not None and 1e3 * value <= most
        for value, most in ((found[metric], most) for metric, most in limits.items())
    )


def _sum(counts: Sequence[int | None]) -> int | None:
    """The sum; None if a part is unknown, or there is none."""
    known = [n for n in counts if n is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _rate(rate: float | None) -> Json:
    """vLLM writes "inf" where all requests are sent as soon as they may be."""
    return "inf" if rate is None or rate == float("inf") else rate


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _ms(seconds: float | np.floating) -> float:
    return 1e3 * float(seconds)
