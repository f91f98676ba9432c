"""What `benchmarks/gpu_profile.py` makes of a trace: when nothing runs, between replays and within."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu_profile.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("gpu_profile", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_profile", module)
    spec.loader.exec_module(module)
    return module


def replay(script: Any, start: int, launch: int) -> list[Any]:
    """90 ns: two kernels that overlap, a gap of 10, a third; then, by another launch, a copy of 5."""
    pieces = [("a", 0, 50), ("b", 40, 60), ("a", 70, 90)]
    found = [script.Piece(name, start + a, start + b, launch) for name, a, b in pieces]
    return [*found, script.Piece("Memcpy DtoH", start + 100, start + 105, launch + 1)]


def test_idle_is_what_no_kernel_or_copy_covers(script: Any) -> None:
    """Three replays 120 ns apart: of two periods of 120, 10 within and 25 between are idle."""
    pieces = [p for i in range(3) for p in replay(script, 1000 + 120 * i, 10 * i)]
    found = script.idle(pieces, 3)
    assert found["span_ms"] == pytest.approx(120e-6)
    assert found["busy_ms"] == pytest.approx(85e-6)
    assert found["idle_share"] == pytest.approx(35 / 120)
    assert found["idle_share_within_steps"] == pytest.approx(10 / 120)
    assert found["idle_share_between_steps"] == pytest.approx(25 / 120)
    assert found["median_between_steps_us"] == pytest.approx(30e-3)
    assert found["copies_and_fills_ms"] == pytest.approx(5e-6)


def test_replays_that_cannot_be_told_are_said(script: Any) -> None:
    """Every kernel with a launch of its own is no graph."""
    pieces = [script.Piece("a", 10 * i, 10 * i + 5, i) for i in range(6)]
    assert "cannot be told" in script.idle(pieces, 2)["why_not"]
    assert "cannot be told" in script.idle([], 2)["why_not"]


def test_kernels_of_a_step(script: Any) -> None:
    """Largest first, per step."""
    pieces = [p for i in range(2) for p in replay(script, 1000 * i, 10 * i)]
    first, second, _ = script.kernels([script.Piece("a", 0, 2000, 1), *pieces], 2)
    assert first == {"name": "a", "us": 1.1, "calls": 2.5}
    assert (second["name"], second["calls"]) == ("b", 1.0)
