"""All draft layers' context keys and values in one kernel on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from paceline.ops.context import context_write
from paceline.ops.dispatch import explain
from tests import context_grid
from tests.context_grid import SHAPES
from tests.fused_grid import EPS, Grid, Shape, angles
from tests.gpu_capture import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GRIDS = [Grid("cuda", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
on_each_type = pytest.mark.parametrize("grid", GRIDS, ids=[str(g.dtype)[6:] for g in GRIDS])


@on_each_type
@pytest.mark.parametrize("tokens", [1, 16, 515])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_is_the_definition(grid: Grid, shape: Shape, tokens: int) -> None:
    """All layers' keys and values; some tokens have no slot."""
    context_grid.writes(grid, tokens, shape)


@on_each_type
def test_special_cases(grid: Grid) -> None:
    """No tokens, a table of another type, numbers that are none."""
    context_grid.writes(grid, 0, SHAPES[0])
    context_grid.writes(grid, 5, SHAPES[0], whole=True)
    context_grid.broken(grid)


def test_a_replay_writes_where_the_slots_say_then() -> None:
    """Positions and slots are read when the graph runs."""
    assert next(c for c in explain("context_write", "cuda", torch.bfloat16) if c.chosen).name == (
        "triton"
    )
    grid = Grid("cuda", torch.bfloat16)
    product, gains = grid.normal(2, 3 * 2 * 8 * 128), torch.ones(3, 128, device="cuda")
    positions, slots = torch.tensor([[1, 2], [5, -1]], device="cuda")
    k, v = torch.zeros(2, 3, 8, 20, 128, dtype=torch.bfloat16, device="cuda")
    given = product, positions, angles(grid, 128), slots, k, v, gains, EPS
    graph, _ = captured(lambda: context_write(*given))
    k.zero_()
    slots.copy_(torch.tensor([-1, 7], device="cuda"))
    graph.replay()
    assert k.abs().sum((0, 1, 3)).nonzero().flatten().tolist() == [7]
