"""StepCosts: learns curves under noise, drift and outliers; monotone; kept on disk."""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cost.table import StepCosts, monotone

PRIOR = [(1, 1, 0.010), (1, 8, 0.013), (1, 16, 0.017)]


def ratio_error(costs: StepCosts, truth: Callable[[int], float], rows: int, most: int) -> float:
    """Largest relative error of cost(rows + n) / cost(rows), which is all that decisions use."""
    curve = costs.curve(rows, most)
    return max(
        abs(curve[n] / curve[0] / (truth(rows + n) / truth(rows)) - 1) for n in range(most + 1)
    )


def test_a_prior_is_used_until_there_are_measurements() -> None:
    """Given points are met, between them lines are drawn, beyond them the last line goes on."""
    costs = StepCosts(PRIOR)
    assert costs.seconds(1, 1) == pytest.approx(0.010)
    assert costs.seconds(1, 8) == pytest.approx(0.013)
    assert costs.seconds(1, 12) == pytest.approx(0.015)
    assert costs.seconds(1, 32) == pytest.approx(0.025)
    assert StepCosts().seconds(1, 1) > 0
    assert StepCosts([(1, 4, 0.01)]).seconds(1, 9) == pytest.approx(0.01, rel=0.02)


def test_the_nearest_number_of_rows_lends_its_prior() -> None:
    """A calibration at several numbers of rows is kept apart by them."""
    costs = StepCosts([*PRIOR, (16, 16, 0.030), (16, 64, 0.120)])
    assert costs.seconds(12, 40) == pytest.approx(0.075, rel=0.02)
    assert costs.seconds(2, 8) == pytest.approx(0.013)


CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda t: 0.005 + 0.00001 * t,
    "linear": lambda t: 0.009 + 0.002 * t,
    "steps": lambda t: 0.006 * math.ceil(t / 8),
    "convex": lambda t: 0.004 + 0.00005 * t * t,
    "concave": lambda t: 0.004 * math.sqrt(t),
}


@pytest.mark.parametrize("name", CURVES)
def test_curves_of_all_forms_are_learned(name: str) -> None:
    """From a prior of another form, with 10 % noise and one outlier in twenty."""
    draw = random.Random(1)
    costs = StepCosts(PRIOR)
    for _ in range(2500):
        tokens = draw.randrange(1, 17)
        seconds = CURVES[name](tokens) * math.exp(draw.gauss(0, 0.1))
        costs.observe(1, tokens, seconds * (8 if draw.random() < 0.05 else 1))
    assert ratio_error(costs, CURVES[name], 1, 15) < 0.08


def test_drift_of_the_machine_moves_all_sizes_together() -> None:
    """Ratios survive a machine that gets twice as slow while only one size is run."""
    draw = random.Random(2)
    costs = StepCosts(PRIOR)
    truth = CURVES["linear"]
    for i in range(600):
        costs.observe(1, 1 + 8 * (i % 2), truth(1 + 8 * (i % 2)) * math.exp(draw.gauss(0, 0.05)))
    for _ in range(100):
        costs.observe(1, 9, 2 * truth(9) * math.exp(draw.gauss(0, 0.05)))
    curve = costs.curve(1, 8)
    assert curve[8] == pytest.approx(2 * truth(9), rel=0.1)
    assert curve[8] / curve[0] == pytest.approx(truth(9) / truth(1), rel=0.15)


def test_one_outlier_moves_little() -> None:
    """A page fault in one step does not turn drafting off."""
    costs = StepCosts(PRIOR)
    for _ in range(50):
        costs.observe(1, 1, 0.010)
        costs.observe(1, 5, 0.012)
    before = costs.curve(1, 4)[4]
    costs.observe(1, 5, 3.0)
    assert costs.curve(1, 4)[4] == pytest.approx(before, rel=0.05)


def test_what_is_no_time_is_ignored() -> None:
    """Zero, negative, infinite and NaN times (a clock that jumped) teach nothing."""
    costs = StepCosts(PRIOR)
    for seconds in (0.0, -1.0, math.inf, math.nan):
        costs.observe(1, 1, seconds)
    costs.observe(0, 0, 1.0)
    assert costs.seconds(1, 1) == pytest.approx(0.010)


def test_other_numbers_of_rows_start_from_what_is_known() -> None:
    """A first batch of eight is not judged by the prior alone."""
    draw = random.Random(3)
    costs = StepCosts(PRIOR)
    truth = CURVES["convex"]
    for _ in range(1500):
        tokens = draw.randrange(1, 33)
        costs.observe(1, tokens, truth(tokens))
    assert ratio_error(costs, truth, 8, 20) < 0.1


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60), st.floats(1e-5, 10.0)), max_size=40),
    st.integers(1, 40),
    st.integers(0, 80),
)
def test_more_tokens_never_cost_less(
    steps: list[tuple[int, int, float]], rows: int, most: int
) -> None:
    """Whatever was measured; and every time is positive and finite."""
    costs = StepCosts(PRIOR)
    for r, extra, seconds in steps:
        costs.observe(r, r + extra, seconds)
    curve = costs.curve(rows, most)
    assert len(curve) == most + 1
    assert all(0 < a < math.inf for a in curve)
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(curve))


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 9)), max_size=12))
def test_monotone_is_the_closest_rising_sequence(points: list[tuple[float, float]]) -> None:
    """Pooled means: rising, each pool the weighted mean of its values, nothing else moved."""
    values, weights = [v for v, _ in points], [w for _, w in points]
    fit = monotone(values, weights)
    assert fit == sorted(fit)
    for level in set(fit):
        members = [i for i, f in enumerate(fit) if f == level]
        total = sum(weights[i] for i in members)
        mean = sum(values[i] * weights[i] for i in members) / total
        assert level == pytest.approx(mean, abs=1e-9)
    if values == sorted(values):
        assert fit == pytest.approx(values)


def _learned() -> StepCosts:
    draw = random.Random(4)
    costs = StepCosts(PRIOR)
    for _ in range(200):
        rows = draw.randrange(1, 5)
        tokens = rows + draw.randrange(20)
        costs.observe(rows, tokens, CURVES["linear"](tokens))
    return costs


def test_what_was_saved_is_read_back(tmp_path: Path) -> None:
    """A second start knows the curves of the first, and goes on learning alike."""
    costs = _learned()
    path = tmp_path / "costs.json"
    costs.save(path, "machine and model")
    again = StepCosts.load(path, "machine and model")
    assert again is not None
    for one in (costs, again):
        one.observe(2, 9, 0.5)
    for rows in (1, 3, 8):
        assert again.curve(rows, 24) == costs.curve(rows, 24)
    assert [p.name for p in tmp_path.iterdir()] == ["costs.json"]


def test_foreign_or_damaged_files_are_measured_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another machine's costs, a cut file and none at all: no costs, and damage is logged."""
    path = tmp_path / "costs.json"
    assert StepCosts.load(path, "here") is None
    _learned().save(path, "there")
    assert StepCosts.load(path, "here") is None
    whole = path.read_text()
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        for bad in (whole[:50], "[]", json.dumps({"format": 1, "key": "here"}), '"x"'):
            path.write_text(bad)
            assert StepCosts.load(path, "here") is None
    assert len(caplog.records) == 4
    assert "measuring anew" in caplog.text


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    """Nothing half-written stays, and what was there stays readable."""
    path = tmp_path / "costs.json"
    _learned().save(path, "here")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        _learned().save(tmp_path / "folder", "here")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["costs.json", "folder"]
    assert StepCosts.load(path, "here") is not None
