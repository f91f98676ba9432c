"""The fused kernels in Triton's interpreter, on the CPU; run by tests/unit/ops/test_triton_fused.py.

Needs TRITON_INTERPRET=1 before Triton is imported, hence a process of its own. The same grid, with many
more tokens, runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton

from tests import fused_grid
from tests.fused_grid import SHAPES, WIDTHS, Grid, Shape
from tests.tolerance import CUT_OFF

GRIDS = [
    Grid("cpu", torch.float32),
    Grid("cpu", torch.float16),
    Grid("cpu", torch.bfloat16, CUT_OFF),
]
IDS = [str(grid.dtype)[6:] for grid in GRIDS]
TOKENS = 3
FEW = [shape for shape in SHAPES if shape.q_heads < 14]  # a program takes milliseconds here

pytestmark = pytest.mark.parametrize("grid", GRIDS, ids=IDS)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", fused_grid.poison(torch.empty))


def test_the_interpreter_is_on(grid: Grid) -> None:
    """Without it nothing here would run on a CPU."""
    assert triton.knobs.runtime.interpret


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_the_definition(grid: Grid, width: int) -> None:
    """Norms and gates of all widths, in memory of all kinds."""
    fused_grid.norms(grid, TOKENS, width)
    fused_grid.added_norms(grid, TOKENS, width)
    fused_grid.gates(grid, TOKENS, width)


@pytest.mark.parametrize("shape", [*FEW, Shape(17, 9, 16)], ids=str)
def test_heads_are_the_definition(grid: Grid, shape: Shape) -> None:
    """Rotations and cache writes, one by one and fused, with norms and without."""
    fused_grid.rotations(grid, TOKENS, shape)
    fused_grid.writes(grid, TOKENS, shape)
    for normed in (False, True):
        fused_grid.projections(grid, TOKENS, shape, normed=normed)


@pytest.mark.parametrize(
    "check", [fused_grid.nothing, fused_grid.nan_stays, fused_grid.out_of_the_ordinary]
)
def test_edges(grid: Grid, check: Callable[[Grid], None]) -> None:
    """Nothing to do, NaN, and what the kernels leave to the reference."""
    check(grid)


def test_rows_have_the_same_bits_in_any_company(grid: Grid) -> None:
    """How many rows there are decides nothing."""
    fused_grid.company(grid, 9)


def test_a_cache_of_another_type(grid: Grid) -> None:
    """Both ways to write it agree."""
    fused_grid.another_type(grid, SHAPES[0])
