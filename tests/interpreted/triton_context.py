"""The kernel of draft layers' context in Triton's interpreter; run by tests/unit/ops/test_triton_fused.py.

Needs TRITON_INTERPRET=1 before Triton is imported, hence a process of its own.
"""

from __future__ import annotations

import pytest
import torch
import triton

from tests import context_grid
from tests.context_grid import SHAPES
from tests.fused_grid import Grid, Shape
from tests.tolerance import CUT_OFF

GRIDS = [Grid("cpu", torch.float32), Grid("cpu", torch.bfloat16, CUT_OFF)]
pytestmark = pytest.mark.parametrize("grid", GRIDS, ids=["float32", "bfloat16"])


def test_the_interpreter_is_on(grid: Grid) -> None:
    """Without it nothing here would run on a CPU."""
    assert triton.knobs.runtime.interpret


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_is_the_definition(grid: Grid, shape: Shape) -> None:
    """All layers' keys and values; some tokens have no slot."""
    context_grid.writes(grid, 5, shape)


def test_special_cases(grid: Grid) -> None:
    """No tokens, a table of another type, numbers that are none."""
    context_grid.writes(grid, 0, SHAPES[0])
    context_grid.writes(grid, 5, SHAPES[0], whole=True)
    context_grid.broken(grid)
