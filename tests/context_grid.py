"""Context writes of all draft layers at once, and what they must give: `ops/reference/context.py`.

Used in Triton's interpreter (`tests/interpreted/triton_context.py`) and on a GPU (`tests/gpu/test_context.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.reference.context import context_write as definition
from paceline.ops.triton.context import context_write
from tests.fused_grid import EPS, NUM_SLOTS, Grid, Shape, angles, places, wide
from tests.tolerance import ROUNDED_TWICE

LAYERS = 3
SHAPES = (Shape(0, 2, 16), Shape(0, 8, 128), Shape(0, 3, 24), Shape(0, 9, 64))


def writes(grid: Grid, tokens: int, shape: Shape, *, whole: bool = False) -> None:
    """Keys and values of all layers where they belong, and nothing else; the product stays as it was.

    With `whole` the angles are in float64, which the kernel leaves to others.
    """
    heads, dim = shape.kv_heads, shape.dim
    positions, slots = places(grid, tokens)
    table = angles(grid, dim).double() if whole else angles(grid, dim)
    gains = grid.normal(LAYERS, dim, seed=5, dtype=torch.float32)
    live = slots[slots >= 0].cpu()
    for product in grid.views(tokens, LAYERS * 2 * heads * dim).values():
        kept, size = product.clone(), (LAYERS, heads, max(NUM_SLOTS, tokens + 1), dim)
        found = [torch.full(size, torch.nan, dtype=grid.dtype, device=grid.device) for _ in "kv"]
        context_write(product, positions, table, slots, *found, gains, EPS)
        assert torch.equal(product, kept)
        want = [torch.full(size, torch.nan, dtype=torch.float64) for _ in "kv"]
        given = wide(product), positions.cpu(), wide(table), slots.cpu()
        definition(*given, *want, wide(gains), EPS)
        for mine, exact, factor in zip(found, want, (ROUNDED_TWICE, 1.0), strict=True):
            if tokens:
                grid.holds(mine[:, :, slots[slots >= 0]], exact[:, :, live], factor)
            assert others(mine[:, :, :-1].cpu(), live).isnan().all(), "nobody wrote there"


def others(cache: Tensor, live: Tensor) -> Tensor:
    """What lies in no written slot."""
    kept = torch.ones(cache.shape[2], dtype=torch.bool)
    kept[live] = False
    return cache[:, :, kept]


def broken(grid: Grid) -> None:
    """What is no number stays in its head, layer and token."""
    positions, slots = places(grid, 3)
    product = grid.normal(3, LAYERS * 2 * 2 * 16)
    product[0, 2 * 2 * 16 + 16] = torch.nan  # of the second layer the second key head
    k, v = torch.zeros(2, LAYERS, 2, NUM_SLOTS, 16, dtype=grid.dtype, device=grid.device)
    gains = torch.ones(LAYERS, 16, device=grid.device)
    context_write(product, positions, angles(grid, 16), slots, k, v, gains, EPS)
    bad = k.isnan().any(-1).nonzero().tolist()
    assert bad == [[1, 1, int(slots[0])]]
    assert v.isfinite().all()
