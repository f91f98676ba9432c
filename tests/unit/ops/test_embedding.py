"""Rows of a table: who copies them, and in Triton's interpreter how."""

from __future__ import annotations

import pytest
import torch

from paceline import ops
from paceline.ops.dispatch import explain
from tests.interpreter import linux, passes


@pytest.mark.slow
@linux
def test_the_kernel_in_the_interpreter() -> None:
    """It copies what `ops/reference` says."""
    passes("triton_embedding")


@linux
def test_a_gpu_gets_the_kernel_and_a_cpu_does_not() -> None:
    """In the three types that it serves."""
    for dtype in (torch.bfloat16, torch.float32):
        assert explain("embedding", "cuda", dtype)[0].chosen
        assert not explain("embedding", "cpu", dtype)[0].chosen
    assert not explain("embedding", "cuda", torch.float64)[0].chosen


def test_rows() -> None:
    """In the order of the ids."""
    table = torch.arange(12.0).view(4, 3)
    assert torch.equal(ops.embedding(torch.tensor([3, 0]), table), table[[3, 0]])
