"""Accept lengths by group, and the target's entropy."""

from __future__ import annotations

import math

import pytest

from paceline.bench.accept import acceptance, entropy
from paceline.bench.run import Settings, Task
from tests.fake_engine import EOS, FakeEngine

TASKS = [
    Task(key="a/0", group="a", prompt_ids=(5, 6)),
    Task(key="b/1", group="b", prompt_ids=(7,)),
    Task(key="a/2", group="a", prompt_ids=(8, 9, 10)),
]
SETTINGS = Settings(max_tokens=7, concurrency=2)
STOPS = frozenset({EOS})


def test_accept_length_is_weighted_by_tokens_and_leaves_the_first_token_out() -> None:
    """Tokens of verify steps over verify steps, per group and in all; only the drafted way runs."""
    engine = FakeEngine([10, 11, 12, 13, 14, 15, 16])
    found = {a.group: a for a in acceptance(engine, TASKS, SETTINGS, stop_ids=STOPS)}
    assert list(found) == ["a", "b", "all"]
    assert [found[g].num_prompts for g in found] == [2, 1, 3]
    for group in found.values():
        assert group.num_tokens == 6 * group.num_prompts
        assert group.accept_length == pytest.approx(group.num_tokens / group.num_steps)
    assert {r.params.num_speculative_tokens for r in engine.added} == {None}


def test_entropy_is_the_mean_of_minus_log_p_at_temperature_one() -> None:
    """Plain decoding, sampled, with each token's own log-probability."""
    engine = FakeEngine([10, 11, 12, 13, 14, 15, 16])
    found = entropy(engine, TASKS, SETTINGS, stop_ids=STOPS)
    assert set(found) == {"a", "b", "all"}
    assert all(math.isfinite(v) and v > 0 for v in found.values())
    for request in engine.added:
        assert request.params.temperature == 1.0
        assert (request.params.num_speculative_tokens, request.params.logprobs) == (0, 0)
