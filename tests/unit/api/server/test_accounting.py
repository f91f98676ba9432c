from __future__ import annotations

from dataclasses import replace

from paceline.api.results import Result
from paceline.api.server.accounting import figures_of, usage_of
from paceline.core.request import RequestStats
from tests.served import context

CONTEXT = replace(context(), drafter="suffix", max_depth=4)
STATS = RequestStats(
    seed=9,
    num_prompt_tokens=10,
    num_cached_tokens=4,
    num_output_tokens=9,
    num_steps=4,
    num_drafted=12,
    num_accepted=4,
    accept_histogram=(1, 2, 1),
    num_preemptions=0,
    queue_s=0.25,
    prefill_s=0.5,
    decode_s=2.0,
    num_forced=1,
    num_drafts=3,
    drafted_per_step=(0, 4, 4, 4),
    accepted_per_step=(0, 1, 1, 2),
)


def result(stats: RequestStats = STATS, *, prompt: int = 0, sample: int = 0) -> Result:
    return Result(
        prompt_index=prompt,
        sample_index=sample,
        prompt_ids=[5] * stats.num_prompt_tokens,
        text="",
        token_ids=[5] * stats.num_output_tokens,
        finish_reason="stop",
        stop_reason=None,
        logprobs=None,
        sources=[0] * stats.num_output_tokens,
        stats=stats,
    )


def test_speculation_is_told_in_vllms_words() -> None:
    """The length counts the bonus token, the rate does not; the histogram is dense."""
    told = figures_of([result()], CONTEXT)["metrics"]["speculative_decoding"]
    assert told == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.333333,
        "acceptance_histogram": [1, 2, 1, 0, 0],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 12,
        "num_spec_tokens": 4,
        "num_drafts": 3,
        "num_forced_tokens": 1,
        "num_verified_nodes": 16,
        "method": "suffix",
    }


def test_steps_are_listed_where_the_server_says_so() -> None:
    """vLLM's two lists; all else is as in the summary."""
    plain = figures_of([result()], CONTEXT)["metrics"]["speculative_decoding"]
    detailed = replace(CONTEXT, spec_metrics="detailed")
    told = figures_of([result()], detailed)["metrics"]["speculative_decoding"]
    assert told == plain | {"per_step_accepted": [0, 1, 1, 2], "per_step_drafted": [0, 4, 4, 4]}


def test_times_are_the_engines() -> None:
    """In milliseconds; the first token's time includes the wait."""
    told = figures_of([result()], CONTEXT)["metrics"]
    assert told["time_to_first_token_ms"] == 750
    assert (told["queue_time_ms"], told["generation_time_ms"]) == (250, 2000)
    assert (told["mean_itl_ms"], told["tokens_per_second"]) == (250, 3.6)


def test_timings_are_llama_cpps() -> None:
    """Its SPEED-Bench client reads draft_n and draft_n_accepted."""
    told = figures_of([result()], CONTEXT)["timings"]
    assert (told["cache_n"], told["prompt_n"], told["prompt_per_second"]) == (4, 6, 12)
    assert (told["predicted_n"], told["predicted_per_second"]) == (9, 4.5)
    assert (told["draft_n"], told["draft_n_accepted"]) == (12, 4)


def test_an_answer_of_nothing_has_figures_too() -> None:
    """One token and no time must not divide by zero."""
    still = replace(
        STATS,
        num_output_tokens=1,
        num_steps=0,
        num_drafted=0,
        num_accepted=0,
        accept_histogram=(0,),
        prefill_s=0.0,
        decode_s=0.0,
    )
    told = figures_of([result(still)], CONTEXT)
    assert told["metrics"]["mean_itl_ms"] is None
    assert told["metrics"]["speculative_decoding"]["mean_acceptance_length"] == 1.0
    assert "draft_n" not in told["timings"]


def test_a_longer_path_than_the_drafters_is_told() -> None:
    """A grammar's forced tokens may go deeper: nothing is lost, and AIPerf's check holds."""
    deep = replace(STATS, accept_histogram=(1, 2, 0, 0, 0, 0, 1))
    told = figures_of([result(deep)], CONTEXT)["metrics"]["speculative_decoding"]
    assert told["num_spec_tokens"] == 6
    assert told["acceptance_histogram"] == [1, 2, 0, 0, 0, 0, 1]


def test_without_a_drafter_nothing_is_claimed() -> None:
    """AIPerf detects speculation by these keys."""
    bare = replace(CONTEXT, drafter="none", max_depth=0)
    plain = replace(STATS, num_drafted=0, num_accepted=0, accept_histogram=(8,), num_steps=8)
    assert "speculative_decoding" not in figures_of([result(plain)], bare)["metrics"]
    silent = replace(CONTEXT, spec_metrics="none")
    assert "speculative_decoding" not in figures_of([result()], silent)["metrics"]


def test_drafts_enter_usage_only_where_asked_for() -> None:
    """Billing code reads these fields."""
    assert "completion_tokens_details" not in usage_of([result()], CONTEXT)
    told = usage_of([result()], replace(CONTEXT, draft_usage=True))["completion_tokens_details"]
    assert told == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 8}


def test_a_prompt_is_counted_once() -> None:
    """Its samples share it."""
    four = [result(prompt=p, sample=s) for p in range(2) for s in range(2)]
    told = usage_of(four, CONTEXT)
    assert (told["prompt_tokens"], told["completion_tokens"]) == (20, 36)
    assert told["prompt_tokens_details"] == {"cached_tokens": 8}
    assert figures_of(four, CONTEXT) == {}
