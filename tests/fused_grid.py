"""The fused kernels of `ops/triton` against `ops/reference` in float64, over shapes, strides and types.

Used in Triton's interpreter (`tests/interpreted`) and on a GPU (`tests/gpu/test_fused.py`). Memory is
NaN before it is written, outputs as well as slots that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.ops.reference import fused as reference
from paceline.ops.triton import fused
from tests.tolerance import RELATIVE, ROUNDED_TWICE, close

EPS = 1e-5
NUM_SLOTS, NUM_POSITIONS = 700, 99
# Widths of rows: sizes of models, of heads, and such as fit no block.
WIDTHS = (2, 17, 64, 96, 128, 576, 1536, 4096)


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of a projection."""

    q_heads: int
    kv_heads: int
    dim: int


SHAPES = (
    Shape(9, 3, 64),
    Shape(32, 8, 128),
    Shape(6, 6, 96),
    Shape(14, 2, 64),
    Shape(40, 1, 128),
    Shape(4, 2, 24),
)


@dataclass(frozen=True, slots=True)
class Grid:
    """Where and in which type the grid runs.

    `factor` is that of `tolerance.CUT_OFF`, or 1.
    """

    device: str
    dtype: torch.dtype
    factor: float = 1.0

    def normal(self, *shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        """Random numbers."""
        gen = torch.Generator().manual_seed(seed)
        made = torch.randn(*shape, generator=gen, dtype=torch.float64)
        return made.to(dtype or self.dtype).to(self.device)

    def holds(self, found: Tensor, exact: Tensor, factor: float = 1.0) -> None:
        """`found` is of the right type and near to the definition."""
        assert found.dtype == self.dtype
        few = 1.5 if exact.numel() < 256 else 1.0  # a large one may come out badly
        assert close(found.cpu(), exact, RELATIVE[self.dtype] * self.factor * factor * few)

    def views(self, tokens: int, width: int, seed: int = 0) -> dict[str, Tensor]:
        """The same rows [tokens, width] in memory of different kinds."""
        rows = self.normal(tokens, width, seed=seed)
        apart = torch.full((tokens, width + 48), torch.nan, dtype=self.dtype, device=self.device)
        odd = torch.full((tokens, width + 5), torch.nan, dtype=self.dtype, device=self.device)
        apart[:, 16 : 16 + width], odd[:, 3 : 3 + width] = rows, rows
        return {"plain": rows, "apart": apart[:, 16 : 16 + width], "odd": odd[:, 3 : 3 + width]}


def wide(x: Tensor) -> Tensor:
    """On the CPU in float64."""
    return x.detach().cpu().double()


def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.empty`, but what nobody writes is seen."""

    def made(*args: object, **kwargs: object) -> Tensor:
        new = make(*args, **kwargs)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    return made


def norms(grid: Grid, tokens: int, width: int) -> None:
    """rms_norm in one to three dimensions; weights of the own type and of float32."""
    for weight in (grid.normal(width, seed=1), grid.normal(width, seed=1, dtype=torch.float32)):
        for x in grid.views(tokens, width).values():
            exact = reference.rms_norm(wide(x), wide(weight), EPS)
            grid.holds(fused.rms_norm(x, weight, EPS), exact)
    heads = grid.normal(tokens, 7 * width)[:, width : 6 * width].view(tokens, 5, width)
    for x in (heads, heads[:, 1], heads[:, ::2], heads[0, 0], heads.transpose(0, 1)):
        exact = reference.rms_norm(wide(x), wide(weight), EPS)
        grid.holds(fused.rms_norm(x, weight, EPS), exact)


def added_norms(grid: Grid, tokens: int, width: int) -> None:
    """The stream is rounded, and that is what is normed; no input is touched."""
    weight = grid.normal(width, seed=2)
    for kind, x in grid.views(tokens, width).items():
        residual = grid.views(tokens, width, seed=1)[kind]
        kept = x.clone(), residual.clone()
        found, stream = fused.add_rms_norm(x, residual, weight, EPS)
        grid.holds(stream, wide(x) + wide(residual))
        grid.holds(found, reference.rms_norm(wide(stream), wide(weight), EPS))
        assert torch.equal(x, kept[0])
        assert torch.equal(residual, kept[1])


def gates(grid: Grid, tokens: int, width: int) -> None:
    """Also far from zero, where exp over- or underflows."""
    for x in grid.views(tokens, 2 * width).values():
        grid.holds(fused.silu_mul(x), reference.silu_mul(wide(x)))
    x = grid.normal(6, 2 * width)
    x[1], x[2], x[3] = x[1] * 20, -90.0, 90.0
    x[4, :width], x[5, :width] = -1e4, 1e4
    found = fused.silu_mul(x)
    grid.holds(found, reference.silu_mul(wide(x)))
    assert found.isfinite().all()


def angles(grid: Grid, dim: int) -> Tensor:
    """A rotary table."""
    turns = torch.arange(NUM_POSITIONS)[:, None] * 10.0 ** -torch.arange(dim // 2)
    return torch.cat((turns.cos(), turns.sin()), dim=1).float().to(grid.device)


def places(grid: Grid, tokens: int) -> tuple[Tensor, Tensor]:
    """Positions, and distinct slots of which every fourth, the second one on, is -1."""
    gen = torch.Generator().manual_seed(tokens)
    positions = torch.randint(NUM_POSITIONS, (tokens,), generator=gen)
    slots = torch.randperm(max(NUM_SLOTS - 1, tokens), generator=gen)[:tokens]
    slots[1::4] = -1
    return positions.to(grid.device), slots.to(grid.device)


def rotations(grid: Grid, tokens: int, shape: Shape) -> None:
    """Queries and keys of a fused projection, side by side, and keys alone."""
    q_heads, kv_heads, dim = shape.q_heads, shape.kv_heads, shape.dim
    positions, table = places(grid, tokens)[0], angles(grid, dim)
    for both in grid.views(tokens, (q_heads + kv_heads) * dim).values():
        parts = torch.split(both, [q_heads * dim, kv_heads * dim], 1)
        q, k = (part.unflatten(1, (-1, dim)) for part in parts)
        exact = reference.rope(wide(q), wide(k), positions.cpu(), wide(table))
        for found, want in zip(fused.rope(q, k, positions, table), exact, strict=True):
            assert found.is_contiguous()
            grid.holds(found, want)
    alone, none = fused.rope(k, k[:, :0], positions, table)
    grid.holds(alone, exact[1])
    assert none.shape == (tokens, 0, dim)


@dataclass(frozen=True, slots=True)
class Cache:
    """A layer's keys and values between two layers that nobody may touch; all NaN."""

    pool: Tensor  # [2, 3, Hkv, S, D]

    @property
    def layer(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the layer in the middle, [Hkv, S, D]."""
        return self.pool[0, 1], self.pool[1, 1]

    def has(self, slots: Tensor, k: Tensor, v: Tensor, holds: Callable[..., None]) -> None:
        """Keys and values are at their slots, and nothing anywhere else but in the dummy slot."""
        live = (slots >= 0).cpu()
        at = slots.cpu()[live]
        pool = self.pool.cpu()
        holds(pool[0, 1][:, at].transpose(0, 1), k[live])
        holds(pool[1, 1][:, at].transpose(0, 1), v[live], 0.0)
        pool[:, 1, :, at] = torch.nan
        assert pool[:, :, :, :-1].isnan().all()


def cache(grid: Grid, tokens: int, shape: Shape, dtype: torch.dtype | None = None) -> Cache:
    """A pool in which nothing was written."""
    size = (2, 3, shape.kv_heads, max(NUM_SLOTS, tokens + 1), shape.dim)
    return Cache(torch.full(size, torch.nan, dtype=dtype or grid.dtype, device=grid.device))


def writes(grid: Grid, tokens: int, shape: Shape) -> None:
    """kv_write from views of a projection."""
    _, slots = places(grid, tokens)
    width = shape.kv_heads * shape.dim
    for both in grid.views(tokens, 2 * width).values():
        k, v = (part.unflatten(1, (-1, shape.dim)) for part in torch.split(both, [width] * 2, 1))
        made = cache(grid, tokens, shape)
        fused.kv_write(*made.layer, slots, k, v)
        made.has(slots, wide(k), wide(v), grid.holds)


def projections(grid: Grid, tokens: int, shape: Shape, *, normed: bool) -> None:
    """rope_write: queries, the cache, and nothing else; the projection stays as it was."""
    dim, width = shape.dim, (shape.q_heads + 2 * shape.kv_heads) * shape.dim
    positions, slots = places(grid, tokens)
    table = angles(grid, dim)
    gains = (grid.normal(dim, seed=3), grid.normal(dim, seed=4)) if normed else None
    factor = ROUNDED_TWICE if normed else 1.0

    def holds(found: Tensor, exact: Tensor, near: float = factor) -> None:
        if near == 0.0:
            assert torch.equal(found.double(), exact), "values are copied"
        else:
            grid.holds(found, exact, near)

    for qkv in grid.views(tokens, width).values():
        kept, made = qkv.clone(), cache(grid, tokens, shape)
        found = fused.rope_write(qkv, positions, table, slots, *made.layer, gains, EPS)
        assert found.is_contiguous()
        assert torch.equal(qkv, kept)
        want = torch.zeros(2, shape.kv_heads, tokens + 1, dim, dtype=torch.float64)
        exact = reference.rope_write(
            wide(qkv),
            positions.cpu(),
            wide(table),
            torch.arange(tokens),
            *want,
            gains and (wide(gains[0]), wide(gains[1])),
            EPS,
        )
        holds(found, exact)
        k, v = want[:, :, :-1].transpose(1, 2)
        made.has(slots, k, v, holds)


def another_type(grid: Grid, shape: Shape) -> None:
    """Keys are rounded to the projection's type, then to the cache's, by either way of writing."""
    other = torch.float32 if grid.dtype != torch.float32 else torch.float16
    positions, slots = places(grid, 5)
    table = angles(grid, shape.dim)
    qkv = grid.normal(5, (shape.q_heads + 2 * shape.kv_heads) * shape.dim)
    made, again = (cache(grid, 5, shape, other) for _ in range(2))
    fused.rope_write(qkv, positions, table, slots, *made.layer, None, EPS)
    heads = qkv.unflatten(1, (-1, shape.dim))
    q, k, v = torch.split(heads, [shape.q_heads, shape.kv_heads, shape.kv_heads], 1)
    _, k = fused.rope(q, k, positions, table)
    fused.kv_write(*again.layer, slots, k, v)
    assert torch.equal(made.pool.nan_to_num(7.0), again.pool.nan_to_num(7.0))
    live = slots[slots >= 0]
    assert torch.equal(made.layer[1][:, live].transpose(0, 1), v[slots >= 0].to(other))


def company(grid: Grid, tokens: int) -> None:
    """A row's bits are the same alone and among others."""
    shape = SHAPES[0]
    x, weight = grid.normal(tokens, 576), grid.normal(576, seed=1)
    qkv = grid.normal(tokens, (shape.q_heads + 2 * shape.kv_heads) * shape.dim)
    gains = (grid.normal(shape.dim, seed=3), grid.normal(shape.dim, seed=4))
    positions, slots = places(grid, tokens)

    def results(rows: slice) -> tuple[Tensor, ...]:
        where = (positions[rows], angles(grid, shape.dim), slots[rows])
        layer = cache(grid, tokens, shape).layer
        return (
            fused.rms_norm(x[rows], weight, EPS),
            *fused.add_rms_norm(x[rows], x.flip(0)[rows], weight, EPS),
            fused.rms_norm(x[rows].view(-1, 9, 64), weight[:64], EPS),
            fused.silu_mul(x[rows]),
            fused.rope_write(qkv[rows], *where, *layer, gains, EPS),
        )

    everything = results(slice(0, tokens))
    for rows in (slice(0, 1), slice(1, 3), slice(2, tokens)):
        for some, whole in zip(results(rows), everything, strict=True):
            assert torch.equal(some, whole[rows])


def nothing(grid: Grid) -> None:
    """No tokens: shapes, and no launch of no programs."""
    shape = SHAPES[0]
    weight, table = grid.normal(64), angles(grid, 64)
    none = torch.zeros(0, dtype=torch.int64, device=grid.device)
    made = cache(grid, 0, shape)
    qkv = grid.normal(0, (shape.q_heads + 2 * shape.kv_heads) * 64)
    q, k = grid.normal(0, 9, 64), grid.normal(0, 3, 64)
    assert fused.rms_norm(grid.normal(0, 64), weight, EPS).shape == (0, 64)
    assert fused.add_rms_norm(*[grid.normal(0, 64)] * 2, weight, EPS)[0].shape == (0, 64)
    assert fused.silu_mul(grid.normal(0, 64)).shape == (0, 32)
    assert fused.rope(q, k, none, table)[0].shape == (0, 9, 64)
    assert fused.rope_write(qkv, none, table, none, *made.layer, None, EPS).shape == (0, 9, 64)
    fused.kv_write(*made.layer, none, k, k)
    assert made.pool.isnan().all()


def nan_stays(grid: Grid) -> None:
    """A broken activation is seen, not hidden, and stays in its row and head."""
    x = grid.normal(3, 64)
    x[1, 5] = torch.nan
    weight = torch.ones(64, dtype=grid.dtype, device=grid.device)
    broken = [False, True, False]
    assert fused.rms_norm(x, weight, EPS).isnan().any(1).tolist() == broken
    assert fused.add_rms_norm(x, x.flip(1), weight, EPS)[0].isnan().any(1).tolist() == broken
    assert fused.silu_mul(x).isnan().any(1).tolist() == broken
    shape = Shape(2, 1, 16)
    positions, slots = places(grid, 3)
    made = cache(grid, 3, shape)
    found = fused.rope_write(
        x, positions, angles(grid, 16), slots, *made.layer, (weight[:16], weight[:16]), EPS
    )
    assert found.isnan().any(2).tolist() == [[False] * 2, [True, False], [False] * 2]
    assert made.layer[0][:, slots[slots >= 0]].isfinite().all()


def out_of_the_ordinary(grid: Grid) -> None:
    """Gradients, transposed tensors, wide rows and rope tables, float64: right, if slower."""
    weight = grid.normal(16, seed=1)
    with torch.enable_grad():
        x = grid.normal(3, 16).requires_grad_()
        fused.rms_norm(x, weight, EPS).sum().backward()
        assert x.grad is not None
    across = grid.normal(16, 3).T
    exact = reference.rms_norm(wide(across), wide(weight), EPS)
    grid.holds(fused.rms_norm(across, weight, EPS), exact)
    broad = grid.normal(1, fused.WIDEST + 1)
    exact = reference.rms_norm(wide(broad), wide(broad[0]), EPS)
    grid.holds(fused.rms_norm(broad, broad[0].contiguous(), EPS), exact)
    q, at = grid.normal(2, 3, 16), torch.tensor([1, 3], device=grid.device)
    table = grid.normal(4, 16, dtype=torch.float64)
    grid.holds(
        fused.rope(q, q, at, table)[0], reference.rope(wide(q), wide(q), at.cpu(), wide(table))[0]
    )
    double = grid.normal(3, 16, dtype=torch.float64)
    assert fused.silu_mul(double).dtype == torch.float64
