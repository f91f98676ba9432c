"""Survival: scores are valid log survivals and follow what was emitted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.draft.survival import Drafted, Survival

CHAIN = Drafted(source=1, length=3, tokens=[5, 6, 7], parents=[-1, 0, 1], probs=[0.5, 0.5, 0.25])
FORK = Drafted(source=2, length=1, tokens=[5, 6, 7], parents=[-1, -1, 1], probs=[0.6, 0.4, 0.4])


@given(st.lists(st.sampled_from([5, 6, 7, 8]), max_size=4), st.integers(0, 300))
def test_scores_never_rise_along_a_path(emitted: list[int], times: int) -> None:
    """The policy's closure under parents rests on it, before and after any learning."""
    survival = Survival()
    for _ in range(times):
        survival.learn(CHAIN, emitted)
        survival.learn(FORK, emitted)
    for drafted in (CHAIN, FORK):
        scores = survival.scores(drafted)
        for score, parent in zip(scores, drafted.parents, strict=True):
            assert -math.inf < score <= (scores[parent] if parent >= 0 else 0.0)


def test_rates_are_learned_per_class() -> None:
    """What was right 3 times in 4 after long own matches says nothing about other classes."""
    survival = Survival()
    other = survival.chance(2, 1, 0.4)
    for i in range(400):
        survival.learn(CHAIN, [5 if i % 4 else 9])
    assert survival.chance(1, 3, 0.5) == pytest.approx(0.75, abs=0.03)
    assert survival.chance(2, 1, 0.4) == other


def test_only_what_is_known_is_judged() -> None:
    """A node off the emitted path, or past its end, is neither right nor wrong."""
    survival = Survival()
    deep = survival.chance(1, 4, 1.0)
    survival.learn(CHAIN, [9, 6])
    survival.learn(CHAIN, [5])
    assert survival.chance(1, 4, 1.0) == deep
    survival.learn(CHAIN, [5, 6])
    assert survival.chance(1, 4, 1.0) > deep


def test_old_evidence_fades() -> None:
    """A change of text shows within a few hundred tokens, however long the past."""
    survival = Survival()
    for _ in range(20_000):
        survival.learn(CHAIN, [5])
    for _ in range(600):
        survival.learn(CHAIN, [9])
    assert survival.chance(1, 3, 0.5) < 0.4


def test_longer_matches_start_out_as_better_evidence() -> None:
    """The prior's order, before anything is learned."""
    survival = Survival()
    for source in (1, 2):
        chances = [survival.chance(source, n, 1.0) for n in (1, 2, 4, 8, 16)]
        assert chances == sorted(chances)
        assert survival.chance(source, 4, 0.3) < survival.chance(source, 4, 0.9)
    assert survival.chance(2, 2, 1.0) < survival.chance(1, 2, 1.0)
