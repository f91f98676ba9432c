"""Kernels that begin while others end: the results of a strict order, eager and replayed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.ops.triton import fused, linear, overlap
from paceline.ops.triton.linear_table import Tiles
from tests.gpu_capture import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
WIDTH, LAYERS = 2048, 24
TILES = Tiles(block_n=64, block_k=128, split=2)


@pytest.fixture(scope="module")
def weights() -> list[tuple[Tensor, Tensor]]:
    """Of many layers, so that each kernel's inputs are the one before's outputs."""
    gen = torch.Generator("cuda").manual_seed(0)

    def matrix(n: int, k: int) -> Tensor:
        return (torch.randn(n, k, generator=gen, device="cuda") / k**0.5).to(torch.bfloat16)

    return [(matrix(2 * WIDTH, WIDTH), matrix(WIDTH, WIDTH)) for _ in range(LAYERS)]


def chain(x: Tensor, weights: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Norms, products (own and the library's) and activations, one after the other."""
    gain = torch.ones(WIDTH, dtype=x.dtype, device=x.device)
    stream, normed = x, fused.rms_norm(x, gain, 1e-6)
    for at, (up, down) in enumerate(weights):
        if at % 3:
            wide = linear.parts(normed, up, Tiles(block_n=64, block_k=128), x.dtype)[0]
        else:
            wide = torch.nn.functional.linear(normed, up)
        inner = fused.silu_mul(wide)
        normed, stream = linear.product_norm(inner, down, stream, gain, 1e-6, TILES)
    return stream


@pytest.mark.parametrize("rows", [1, 16, 64])  # all of which overlap
def test_the_order_of_results_is_the_streams(
    rows: int, weights: list[tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what kernels give of which none begins before the last has ended."""
    x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(overlap, "_MOST_TOKENS", 0)
        want = chain(x, weights)
        x2 = torch.randn_like(x)
        want2 = chain(x2, weights)
    assert not torch.equal(want, want2)
    for _ in range(20):
        assert torch.equal(chain(x, weights), want)
    graph, found = captured(lambda: chain(x, weights))
    before = x.clone()
    for _ in range(20):
        for given, right in ((x2, want2), (before, want)):
            x.copy_(given)
            found.zero_()
            graph.replay()
            assert torch.equal(found, right)


def test_this_gpu_overlaps_if_it_can() -> None:
    """By its compute capability, few tokens, and never on a CPU."""
    can = torch.cuda.get_device_capability() >= (9, 0)
    for options in (overlap.product, overlap.between):
        assert bool(options(torch.zeros(16, 1, device="cuda"))["OVERLAPS"]) == can
        assert options(torch.zeros(1024, 1, device="cuda")) == {"OVERLAPS": 0}
        assert options(torch.zeros(16, 1)) == {"OVERLAPS": 0}
