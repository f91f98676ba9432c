"""Ceilings of a device: what a product takes at least, and that they can be measured here."""

from __future__ import annotations

import pytest
import torch

from paceline.cost.hardware import H200, Hardware, measure, preset

PLAIN = Hardware(name="x", read_bandwidth=1e9, matmul_rate=1e12)
RISING = Hardware(
    name="y", read_bandwidth=1e9, matmul_rate=1e12, read_rise=((1, 1.0), (8, 1.2), (16, 2.0))
)


def test_a_product_takes_the_longer_of_reading_and_computing() -> None:
    """Few rows read, many compute; neither is added to the other."""
    assert PLAIN.product_seconds(1, 2e9, 1e9) == pytest.approx(2.0)
    assert PLAIN.product_seconds(9999, 2e9, 5e12) == pytest.approx(5.0)


@pytest.mark.parametrize(
    "rows,factor", [(1, 1.0), (8, 1.2), (12, 1.6), (16, 2.0), (17, 2.0), (4096, 2.0)]
)
def test_reading_slows_down_as_measured(rows: int, factor: float) -> None:
    """Between measured row counts on the line, beyond them flat."""
    assert RISING.product_seconds(rows, 1e9, 0.0) == pytest.approx(factor)


def test_more_rows_never_take_less() -> None:
    """A floor that falls with the work would make a slower step look better."""
    times = [H200.product_seconds(t, 2e9, 2e9 * t) for t in range(1, 2000)]
    assert times == sorted(times)


def test_ceilings_are_measured_here() -> None:
    """Plausible on any machine, and the larger size is not a different unit."""
    found = measure(torch.device("cpu"), torch.float32, scale=0.01)
    assert 1e8 < found.read_bandwidth < 1e13
    assert 1e7 < found.matmul_rate < 1e15
    assert found.launch is not None
    assert 1e-8 < found.launch < 1e-2
    assert found.read_rise == ()


def test_no_ceilings_are_kept_for_processors() -> None:
    """They differ too much: there they are measured."""
    assert preset(torch.device("cpu")) is None
