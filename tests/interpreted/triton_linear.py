"""Products of few rows in Triton's interpreter, on the CPU; run by tests/unit/ops/test_triton_linear.py.

Needs TRITON_INTERPRET=1 before Triton is imported, hence a process of its own. The interpreter has no
products of bfloat16, so everything is in float16; the same grid in both runs on a GPU.
"""

from __future__ import annotations

import pytest
import torch
import triton
from torch import Tensor

from paceline.ops import composed
from paceline.ops.reference import linear as reference
from paceline.ops.triton import linear, linear_table
from paceline.ops.triton.linear_table import Tiles
from tests import fused_grid, linear_grid
from tests.linear_grid import EPS, ODD_SIZES, TILES, Grid

GRID = Grid("cpu", torch.float16)
ROWS = (1, 16, 33)  # a program takes milliseconds here
on_all_tiles = pytest.mark.parametrize("tiles", TILES, ids=str)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", fused_grid.poison(torch.empty))


def test_the_interpreter_is_on() -> None:
    """Without it nothing here would run on a CPU."""
    assert triton.knobs.runtime.interpret


@on_all_tiles
@pytest.mark.parametrize("size", ODD_SIZES, ids=str)
def test_products_are_the_definition(size: tuple[int, int], tiles: Tiles) -> None:
    """Parts and what is made of them, at all sizes, for one row and for most."""
    for rows in ROWS:
        linear_grid.products(GRID, rows, size, tiles)
        linear_grid.norms(GRID, rows, size, tiles)


def test_sizes_of_a_model() -> None:
    """Hidden size and that within its MLP."""
    linear_grid.norms(GRID, 3, (576, 1536), TILES[0])


@on_all_tiles
def test_rows_have_the_same_bits_in_any_company(tiles: Tiles) -> None:
    """How many rows there are decides nothing, up to 16."""
    linear_grid.company(GRID, (136, 200), tiles)


@on_all_tiles
def test_nan_stays_where_it_is(tiles: Tiles) -> None:
    """Rows and features."""
    linear_grid.nan_stays(GRID, tiles)


LINES = {
    ("linear_add_rms_norm", 96, 64): {16: Tiles(block_n=32, block_k=32, split=2)},
    ("linear", 96, 64): {16: TILES[3], 32: TILES[4]},  # the first is split: not for this operator
    ("linear_f32", 96, 64): {64: TILES[4], 128: TILES[4]},
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A table of three lines for this machine; gets the rows of each product that a kernel computes."""
    launches: list[int] = []
    by_kernel = linear.parts

    def parts(x: Tensor, weight: Tensor, tiles: Tiles, dtype: torch.dtype) -> Tensor:
        launches.append(x.shape[0])
        return by_kernel(x, weight, tiles, dtype)

    monkeypatch.setattr(linear_table, "TABLE", LINES)
    monkeypatch.setattr(linear, "_measured", lambda _: True)
    monkeypatch.setattr(linear, "parts", parts)
    return launches


def test_the_table_chooses(launched: list[int]) -> None:
    """An operator, a size and a number of rows without a line are left to the library."""
    for rows in (0, 1, 16, 17, 32, 33, 64, 65, 128, 129):
        x, weight, residual, gain = GRID.inputs(rows, 96, 64)
        found = linear.linear_add_rms_norm(x, weight, residual, gain, EPS)
        want = reference.linear_add_rms_norm(x, weight, residual, gain, EPS)
        torch.testing.assert_close(found, want, atol=2e-3, rtol=2e-3)
        pairs = [
            (linear.linear(x, weight), reference.linear(x, weight)),
            (linear.linear_f32(x, weight), x.float() @ weight.float().T),
        ]
        for one, other in pairs:
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)
    assert launched == [1, 16, 17, 32, 33, 64, 65, 128]
    launched.clear()
    x, weight, residual, gain = GRID.inputs(3, 64, 96)
    linear.linear_add_rms_norm(x, weight, residual, gain, EPS)
    assert not launched


def test_what_the_kernels_do_not_take(launched: list[int]) -> None:
    """Other types and strides, gradients, another GPU: right, by the library."""
    given = GRID.inputs(3, 96, 64)
    for dtype in (torch.float32, torch.float64):
        x, weight, residual, gain = (tensor.to(dtype) for tensor in given)
        out, stream = linear.linear_add_rms_norm(x, weight, residual, gain, EPS)
        assert out.dtype == stream.dtype == dtype
        want = composed.linear_add_rms_norm(x, weight, residual, gain, EPS)
        assert torch.equal(out, want[0])
        assert torch.equal(stream, want[1])
    x, weight, residual, gain = given
    across = weight.T.contiguous().T
    want = reference.linear_add_rms_norm(x, weight, residual, gain, EPS)
    found = linear.linear_add_rms_norm(x, across, residual, gain, EPS)
    torch.testing.assert_close(found, want, atol=2e-3, rtol=2e-3)
    with torch.enable_grad():
        learnt = gain.clone().requires_grad_()
        linear.linear_add_rms_norm(x, weight, residual, learnt, EPS)[0].sum().backward()
        assert learnt.grad is not None
    bias = GRID.normal(96, seed=4)
    assert torch.equal(linear.linear(x, weight, bias), reference.linear(x, weight, bias))
    assert not launched


def test_another_gpu_gets_none(monkeypatch: pytest.MonkeyPatch, launched: list[int]) -> None:
    """The lines are measurements of one kind of GPU."""
    monkeypatch.undo()
    monkeypatch.setattr(linear_table, "TABLE", LINES)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(linear, "parts", lambda *_: pytest.fail("a kernel ran"))
    linear.linear_add_rms_norm(*GRID.inputs(3, 96, 64), EPS)
    assert not launched
