"""What answers cost and how they were made, in the clients' forms: usage, metrics, timings.

`usage` is OpenAI's, `metrics` vLLM's (its per-request figures), `timings` llama.cpp's. Times are the
engine's own: waiting for a row, computing the prompt with the first token, decoding the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.api.server.context import NO_DRAFTER

if TYPE_CHECKING:
    from paceline.api.results import Result
    from paceline.api.server.context import Context
    from paceline.core.request import RequestStats


def usage_of(
    results: Sequence[Result], context: Context, *, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """`usage` of a whole answer. A prompt counts once, however many samples it has.

    Args:
        results: of every sample of every prompt.
        context: what is served.
        reasoning_tokens: how many of the tokens were reasoning; None: it is not known.
    """
    first = [result for result in results if result.sample_index == 0]
    found = tokens_used(
        sum(len(result.prompt_ids) for result in first),
        sum(len(result.token_ids) for result in results),
    )
    cached = sum(result.stats.num_cached_tokens for result in first)
    found["prompt_tokens_details"] = {"cached_tokens": cached}
    details: dict[str, int] = {}
    if reasoning_tokens is not None:
        details["reasoning_tokens"] = reasoning_tokens
    if context.draft_usage:
        accepted = sum(result.stats.num_accepted for result in results)
        details["accepted_prediction_tokens"] = accepted
        drafted = sum(result.stats.num_drafted for result in results)
        details["rejected_prediction_tokens"] = drafted - accepted
    if details:
        found["completion_tokens_details"] = details
    return found


def tokens_used(prompt: int, completion: int) -> dict[str, Any]:
    """`usage` as it is known while an answer is made."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def figures_of(results: Sequence[Result], context: Context) -> dict[str, Any]:
    """`metrics` and `timings`, which stand beside `choices`; empty for more than one answer."""
    if len(results) != 1:
        return {}
    stats, generated = results[0].stats, len(results[0].token_ids)
    return {"metrics": _metrics(stats, generated, context), "timings": _timings(stats, generated)}


def _metrics(stats: RequestStats, generated: int, context: Context) -> dict[str, Any]:
    seconds = stats.prefill_s + stats.decode_s
    found: dict[str, Any] = {
        "time_to_first_token_ms": _ms(stats.queue_s + stats.prefill_s),
        "generation_time_ms": _ms(stats.decode_s),
        "queue_time_ms": _ms(stats.queue_s),
        "prefill_time_ms": _ms(stats.prefill_s),
        "mean_itl_ms": _ms(stats.decode_s / (generated - 1)) if generated > 1 else None,
        "tokens_per_second": _rate(generated, seconds),
        "num_preemptions": stats.num_preemptions,
        "seed": stats.seed,
    }
    # A grammar's forced tokens are verified like drafts, also where no drafter is loaded.
    if context.spec_metrics != "none" and (context.drafter != NO_DRAFTER or stats.num_drafted):
        found["speculative_decoding"] = _speculation(stats, context)
    return found


def _speculation(stats: RequestStats, context: Context) -> dict[str, Any]:
    """vLLM's object. For a tree, steps are described by the path that was accepted."""
    # Forced tokens of a grammar may make a path longer than a drafter does.
    depth = max(context.max_depth, len(stats.accept_histogram) - 1)
    histogram = [*stats.accept_histogram] + [0] * (depth + 1 - len(stats.accept_histogram))
    found = {
        "mean_acceptance_length": stats.accept_length,
        "draft_acceptance_rate": _rate(stats.num_accepted, stats.num_drafted),
        "acceptance_histogram": histogram,
        "num_spec_steps": stats.num_steps,
        "num_accepted_draft_tokens": stats.num_accepted,
        "num_draft_tokens": stats.num_drafted,
        "num_spec_tokens": depth,
        "num_drafts": stats.num_drafts,  # of the steps, those with a draft
        "num_forced_tokens": stats.num_forced,  # of the accepted ones, the grammar's
        "num_verified_nodes": stats.num_drafted + stats.num_steps,  # roots are verified too
        "method": stats.drafter or context.drafter,
    }
    if context.spec_metrics == "detailed":
        found |= {
            "per_step_accepted": list(stats.accepted_per_step),
            "per_step_drafted": list(stats.drafted_per_step),
        }
    return found


def _timings(stats: RequestStats, generated: int) -> dict[str, Any]:
    prompt = stats.num_prompt_tokens - stats.num_cached_tokens
    found: dict[str, Any] = {
        "cache_n": stats.num_cached_tokens,
        "prompt_n": prompt,
        "prompt_ms": _ms(stats.prefill_s),
        "prompt_per_token_ms": _ms(stats.prefill_s / max(1, prompt)),
        "prompt_per_second": _rate(prompt, stats.prefill_s),
        "predicted_n": generated,
        "predicted_ms": _ms(stats.decode_s),
        "predicted_per_token_ms": _ms(stats.decode_s / max(1, generated)),
        "predicted_per_second": _rate(generated, stats.decode_s),
    }
    if stats.num_drafted:
        found |= {"draft_n": stats.num_drafted, "draft_n_accepted": stats.num_accepted}
    return found


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _rate(count: int, over: float) -> float:
    """0 where nothing was measured: JSON has no infinity."""
    return round(count / over, 6) if over > 0 else 0.0
