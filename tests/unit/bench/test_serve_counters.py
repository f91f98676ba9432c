from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.serve_counters import NOTHING_COUNTED, Counters, read_counters

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="a"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a"} 40.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="1"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="a",position="2"} 2.0
vllm:num_requests_running{engine="0"} 3.0
"""


def counted(text: str, model: str | None = None) -> Counters:
    found = read_counters(text, model)
    assert found is not None
    return found


def test_figures_are_those_of_everybody() -> None:
    """Accept length with the bonus token, rate without, position rates by steps; the identity."""
    got = counted(VLLM)
    assert (got.prefix, got.num_drafts, got.num_draft_tokens, got.num_accepted_tokens) == (
        "vllm:",
        10,
        40,
        15,
    )
    assert got.accept_length == 2.5
    assert got.acceptance_rate == 15 / 40
    assert got.position_rates == [0.8, 0.5, 0.2]
    assert got.accept_length == pytest.approx(1 + sum(got.position_rates))
    assert got.contradiction() is None


def test_one_prefix_counts() -> None:
    """A server that shows its counters under two names has not accepted twice as much."""
    twice = VLLM + VLLM.replace("vllm:", "paceline:").replace("40.0", "44.0")
    got = counted(twice)
    assert (got.prefix, got.num_draft_tokens) == ("paceline:", 44)


@pytest.mark.parametrize("prefix,suffix", [("llamacpp:", ""), ("other_", "_total"), ("", "_total")])
def test_other_servers_use_the_names_behind_their_own_prefix(prefix: str, suffix: str) -> None:
    """With or without `_total`; without positions there are no rates, and nothing to contradict."""
    text = f"{prefix}spec_decode_num_drafts{suffix} 4\n{prefix}spec_decode_num_accepted_tokens{suffix} 6"
    got = counted(text)
    assert (got.prefix, got.accept_length, got.position_rates) == (prefix, 2.5, [])
    assert got.contradiction() is None


def test_engines_are_summed_and_models_told_apart() -> None:
    """Replicas behind one page count together; another model's counters don't count."""
    second = VLLM.replace('engine="0"', 'engine="1"')
    other = VLLM.replace('model_name="a"', 'model_name="b"').replace(" 15.0", " 99.0")
    got = counted(VLLM + second + other, "a")
    assert (got.num_drafts, got.num_accepted_tokens, got.per_position[2]) == (20, 30, 4)
    assert counted(VLLM, "unknown").num_drafts == 10
    assert counted(VLLM + "vllm:spec_decode_num_drafts_total 5\n", "a").num_drafts == 15


def test_lines_that_say_nothing_are_passed_over() -> None:
    """Broken lines, numbers that are none, labels with signs in them."""
    text = (
        "spec_decode_num_drafts_total NaN\nspec_decode_num_drafts_total\n"
        'x:spec_decode_num_drafts_total{a="}\\" {",b=""} 3 1700000000\n'
        "spec_decode_num_drafts_total{ +Inf\nx:spec_decode_num_draft_tokens_bucket 5\n"
    )
    assert counted(text).num_drafts == 3
    assert read_counters("a 1\nb 2\n") is None
    assert read_counters("") is None


def test_what_was_counted_since() -> None:
    """A run's own counts; a server that began anew in between has none of it."""
    later = counted(
        VLLM.replace(" 10.0", " 14.0").replace(" 15.0", " 17.0").replace(" 8.0", " 10.0")
    )
    got = later.since(counted(VLLM))
    assert got is not None
    assert (got.num_drafts, got.num_accepted_tokens, dict(got.per_position)) == (
        4,
        2,
        {0: 2, 1: 0, 2: 0},
    )
    assert got.contradiction() is None
    assert counted(VLLM).since(later) is None
    assert counted(VLLM).since(NOTHING_COUNTED) == counted(VLLM)


def test_a_run_without_drafts_has_no_figures() -> None:
    """Nothing drafted is not an accept length of 1."""
    got = counted(VLLM).since(counted(VLLM))
    assert got is not None
    assert (got.accept_length, got.acceptance_rate, got.position_rates) == (None, None, [])


def test_a_contradiction_is_told() -> None:
    """Accept length = 1 + sum of position rates, or one of the counters lies."""
    told = counted(VLLM.replace(" 15.0", " 16.0")).contradiction()
    assert told is not None
    assert "2.6000" in told
    assert "2.5000" in told


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_the_identity_holds_for_every_honest_server(accepted: list[int]) -> None:
    """Whatever steps accepted: counting by totals and by positions is the same."""
    honest = Counters(
        prefix="",
        num_drafts=len(accepted),
        num_draft_tokens=5 * len(accepted),
        num_accepted_tokens=sum(accepted),
        per_position={i: sum(a > i for a in accepted) for i in range(5)},
    )
    assert honest.contradiction() is None
    rates = honest.position_rates
    assert rates == sorted(rates, reverse=True)
