"""The batch-invariant kernels on a CPU, in Triton's interpreter; and what the host decides about them."""

from __future__ import annotations

import pytest
import torch

from paceline.attention.triton_invariant import InvariantTritonAttention
from paceline.kv.layout import Heads
from tests.interpreter import linux, passes


@pytest.mark.slow
@linux
def test_kernels_in_the_interpreter() -> None:
    """The definition within the tolerance, and one set of bits in every company."""
    passes("triton_invariance")


@linux
@pytest.mark.parametrize("n, k", [(4096, 12_288), (4096, 4096), (576, 1536), (151_936, 4096)])
def test_tiles_follow_from_the_weight_alone(n: int, k: int) -> None:
    """Parts of K are none empty, and blocks are what the tensor cores take."""
    from paceline.ops.triton.product_invariant import tiles_for

    tiles = tiles_for(n, k)
    steps = -(-k // tiles.block_k)
    assert (tiles.split - 1) * -(-steps // tiles.split) < steps
    assert tiles.block_n in (32, 64, 128)
    shared = tiles.num_stages * (64 + tiles.block_n) * tiles.block_k * 2
    assert shared <= 110 << 10, "two programs a multiprocessor"


def test_a_cpu_never_gets_it() -> None:
    """There the mode has kernels of its own."""
    cpu = torch.device("cpu")
    reason = InvariantTritonAttention().refuses(Heads(3, 64), cpu, torch.bfloat16, 16)
    assert reason == "it is for CUDA devices, not for cpu"
