"""What `benchmarks/gpu_without.py` leaves out: every own operator of a GPU, one group at a time, and only then."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.ops import dispatch
from paceline.ops.triton import overlap

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu_without.py"
DTYPE = torch.bfloat16


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("gpu_without", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_without", module)
    spec.loader.exec_module(module)
    return module


def test_every_own_operator_of_a_gpu_is_in_a_group(script: Any) -> None:
    """A new line of the dispatch table is measured too, or this says so."""
    own = {op for op, lines in dispatch.OPS.items() if any(x.name == "triton" for x in lines)}
    assert own <= set(script.HIDDEN) <= set(dispatch.OPS)


def test_definitions_are_had_for_the_time_of_the_context(script: Any) -> None:
    """Also where another implementation was chosen before, and afterwards that one again."""
    before = dict(dispatch.OPS)
    usual = dispatch.implementation("rms_norm", "cpu", DTYPE)
    with script.definitions_of(["rms_norm"]):
        changed = [op for op, lines in dispatch.OPS.items() if lines != before[op]]
        assert changed == ["rms_norm"]
        found = dispatch.implementation("rms_norm", "cpu", DTYPE)
        assert found.__module__ == "paceline.ops.reference.fused"
    assert before == dispatch.OPS
    assert dispatch.implementation("rms_norm", "cpu", DTYPE) is usual


def test_nothing_overlaps_for_the_time_of_the_context(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tensors of one token, for which kernels overlap at most."""

    class OnGpu:
        is_cuda, shape, device = True, (1, 8), "cuda"

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    x: Any = OnGpu()
    usual = overlap.between(x)
    assert usual["launch_pdl"]
    with script.one_after_the_other():
        assert overlap.between(x) == {"OVERLAPS": overlap.NONE}
    assert overlap.between(x) == usual


def test_differences_are_from_the_mean_of_both_measurements(script: Any) -> None:
    """Drift counts half."""
    rows = [
        {"without": name, "ms_per_step": ms}
        for name, ms in (("nothing", [4.0, 7.0]), ("pick", [5.0, 8.0]), ("nothing", [4.2, 7.0]))
    ]
    script.compare(rows)
    assert [row["more_ms"] for row in rows] == [[-0.1, 0.0], [0.9, 1.0], [0.1, 0.0]]
