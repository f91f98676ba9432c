"""Kernels of a step's bookkeeping, trees and candidates on a CPU: in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import pytest
import torch

from paceline.ops.dispatch import explain
from tests.interpreter import linux, passes

OPS = (
    "keyed_noise",
    "noise_ahead",
    "chain",
    "emitted",
    "largest",
    "best_first",
    "rank_candidates",
    "learn",
    "select",
    "verify_inputs",
    "pick_places",
    "judge",
    "move_paths",
    "advance",
    "compact",
)


@pytest.mark.slow
@linux
@pytest.mark.parametrize("grid", ["triton_tree", "triton_drafts"])
def test_the_kernels_in_the_interpreter(grid: str) -> None:
    """They compute what `ops/reference` defines, as far as a CPU can tell."""
    passes(grid)


@pytest.mark.parametrize("op", OPS)
def test_a_gpu_gets_the_kernels_and_a_cpu_does_not(op: str) -> None:
    """Whole numbers depend on no dtype: a network in float64 has the same kernels."""
    lines = {c.name: c for c in explain(op, "cpu", torch.float32)}
    assert lines["torch"].chosen
    assert not lines["triton"].chosen
    assert explain(op, "cuda", torch.float32)[0].name == "triton"
