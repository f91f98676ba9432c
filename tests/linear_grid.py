"""Products of few rows by `ops/triton/linear.py` against float64, over sizes, tiles and strides.

Used in Triton's interpreter (`tests/interpreted`) and on a GPU (`tests/gpu/test_linear.py`). All memory
is NaN before it is written, and so is what lies between the rows of a view.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.ops.reference import fused as reference
from paceline.ops.triton import linear
from paceline.ops.triton.linear_table import BLOCKS, Tiles
from tests.tolerance import RELATIVE, ROUNDED_TWICE, close

EPS = 1e-5
# Of [N, K]: sizes of models, and such as fit no block, of which some forbid wide reads.
ODD_SIZES = ((96, 64), (130, 200), (17, 33))
SIZES = (*ODD_SIZES, (576, 1536), (1536, 576), (49, 1000))
GAPS = (0, 5)  # between rows; the second forbids wide reads
# With splits that leave the last part short, or empty.
TILES = (
    Tiles(block_n=64, block_k=128, split=4),
    Tiles(block_n=32, block_k=256, split=2, num_stages=3),
    Tiles(block_n=16, block_k=64, split=7, num_stages=6),
    Tiles(block_n=64, block_k=128, split=3, swap=True),
    Tiles(block_n=16, block_k=32, swap=True),
)


@dataclass(frozen=True, slots=True)
class Grid:
    """Where and in which type the grid runs; `sums` is how near sums in float32 come."""

    device: str
    dtype: torch.dtype
    sums: float = RELATIVE[torch.float32]

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        """Random numbers."""
        gen = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=gen, device=self.device).to(self.dtype)

    def inputs(self, rows: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [T, K], a weight [N, K] whose products are of one size, a stream [T, N], a gain [N]."""
        weight = (self.normal(n, k, seed=1).float() / k**0.5).to(self.dtype)
        rest = self.normal(rows, n, seed=2), self.normal(n, seed=3)
        return self.normal(rows, k), weight, *rest

    def apart(self, x: Tensor, gap: int) -> Tensor:
        """The same rows with a gap of NaN behind each."""
        room = torch.full((x.shape[0], x.shape[1] + gap), torch.nan, dtype=x.dtype, device=x.device)
        room[:, : x.shape[1]] = x
        return room[:, : x.shape[1]]


def shared_bytes(tiles: Tiles, rows: int) -> int:
    """Shared memory of a program for so many rows: all its blocks of 16 bits that are on their way."""
    block = next(block for block in BLOCKS if rows <= block)
    return 2 * tiles.num_stages * (block + tiles.block_n) * tiles.block_k


def products(grid: Grid, rows: int, size: tuple[int, int], tiles: Tiles) -> None:
    """Parts, each over its piece of K, in float32; a product that is not split in its own type too."""
    x, weight, _, _ = grid.inputs(rows, *size)
    blocks = -(-size[1] // tiles.block_k)
    per = -(-blocks // tiles.split) * tiles.block_k
    for gap in GAPS if rows <= 16 else GAPS[:1]:
        a, b = (x, weight) if gap == 0 else (grid.apart(x, gap), grid.apart(weight, gap))
        found = linear.parts(a, b, tiles, torch.float32)
        assert found.shape == (tiles.split, rows, size[0])
        for part, one in enumerate(found):
            piece = slice(part * per, (part + 1) * per)
            exact = x[:, piece].double() @ weight[:, piece].double().T
            if exact.any():
                assert close(one, exact, grid.sums)
            else:
                assert not one.any(), "a part behind the end of K"
        if tiles.split == 1:
            short = linear.parts(a, b, tiles, grid.dtype)[0]
            assert torch.equal(short, found[0].to(grid.dtype))


def norms(grid: Grid, rows: int, size: tuple[int, int], tiles: Tiles) -> None:
    """The product is rounded, so is the stream, and that is what is normed; no input is touched."""
    given = grid.inputs(rows, *size)
    x, weight, residual, gain = given
    kept = [tensor.clone() for tensor in given]
    # As two operators that round where they should: what differs are sums at a rounding's border.
    product = (x.double() @ weight.double().T).to(grid.dtype)
    want = (residual.double() + product.double()).to(grid.dtype)
    for gap in GAPS:
        before = residual if gap == 0 else grid.apart(residual, gap)
        out, stream = linear.product_norm(x, weight, before, gain, EPS, tiles)
        assert out.dtype == stream.dtype == grid.dtype
        exact = residual.double() + x.double() @ weight.double().T
        few = 1.5 if exact.numel() < 256 else 1.0  # a large one may come out badly
        assert close(stream, exact, RELATIVE[grid.dtype] * ROUNDED_TWICE * few)
        assert int((stream != want).sum()) <= max(2, 0.02 * want.numel())
        exact = reference.rms_norm(stream.double(), gain.double(), EPS)
        assert close(out, exact, RELATIVE[grid.dtype] * few)
    for tensor, was in zip(given, kept, strict=True):
        assert torch.equal(tensor, was)


def company(grid: Grid, size: tuple[int, int], tiles: Tiles) -> None:
    """Up to 16 rows, a row's bits are the same alone and among others.

    Rows should begin at multiples of 16 bytes, as they do in whole tensors: how the norm's sum is
    shared among threads follows from how wide they read.
    """
    x, weight, residual, gain = grid.inputs(16, *size)
    everything = linear.product_norm(x, weight, residual, gain, EPS, tiles)
    plain = linear.parts(x, weight, tiles, torch.float32)
    for rows in (slice(0, 1), slice(7, 8), slice(15, 16), slice(2, 5), slice(3, 16)):
        some = linear.product_norm(x[rows], weight, residual[rows], gain, EPS, tiles)
        for found, whole in zip(some, everything, strict=True):
            assert torch.equal(found, whole[rows])
        assert torch.equal(linear.parts(x[rows], weight, tiles, torch.float32), plain[:, rows])


def nan_stays(grid: Grid, tiles: Tiles) -> None:
    """A broken activation is seen, not hidden, and stays in its row; a broken weight in its column."""
    x, weight, residual, gain = grid.inputs(5, 96, 64)
    x[1, 5] = torch.nan
    out, stream = linear.product_norm(x, weight, residual, gain, EPS, tiles)
    for found in (out, stream):
        assert found.isnan().all(1).tolist() == [False, True, False, False, False]
        assert found.isnan().any(1).tolist() == [False, True, False, False, False]
    x[1, 5], weight[70, 3] = 0.0, torch.nan
    found = linear.parts(x, weight, tiles, torch.float32)
    assert found.isnan().any(0).all(0).nonzero().tolist() == [[70]]
    assert found.isnan().any(0).any(0).nonzero().tolist() == [[70]]
