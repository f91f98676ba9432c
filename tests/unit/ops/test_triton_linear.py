"""Products of few rows: the kernels in Triton's interpreter, who is chosen, and the whole operator."""

from __future__ import annotations

import pytest
import torch

from paceline import ops
from paceline.ops.dispatch import explain
from paceline.ops.reference import linear as reference
from paceline.ops.triton import linear_table
from paceline.ops.triton.linear_table import Tiles, tiles_for
from tests.interpreter import linux, passes


@pytest.mark.slow
@linux
def test_products_in_the_interpreter() -> None:
    """The kernels compute what `ops/reference` defines, as far as a CPU can tell."""
    passes("triton_linear")


def chosen(op: str, device_type: str, dtype: torch.dtype) -> str:
    return next(c.name for c in explain(op, device_type, dtype) if c.chosen)


@linux
@pytest.mark.parametrize("op", ["linear", "linear_f32", "linear_add_rms_norm"])
def test_a_gpu_gets_the_kernels_and_a_cpu_never(op: str) -> None:
    """Where the table has a line; float64 is the reference's everywhere."""
    assert chosen(op, "cuda", torch.bfloat16) == "triton"
    assert chosen(op, "cpu", torch.bfloat16) != "triton"
    assert chosen(op, "cuda", torch.float64) in ("torch", "two operators")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_on_a_cpu_it_is_its_two_parts(dtype: torch.dtype) -> None:
    """Bit by bit, by whatever computes these: with a bias and packed weights too."""
    x, residual = torch.randn(3, 64, dtype=dtype), torch.randn(3, 96, dtype=dtype)
    weight, gain = torch.randn(96, 64, dtype=dtype) / 8, torch.randn(96, dtype=dtype)
    bias = torch.randn(96, dtype=dtype)
    packed = ops.pack(weight, "8bit", dtype) if dtype != torch.float64 else weight
    for matrix, add in ((weight, None), (weight, bias), (packed, None), (packed, bias)):
        found = ops.linear_add_rms_norm(x, matrix, residual, gain, 1e-5, add)
        want = ops.add_rms_norm(ops.linear(x, matrix, add), residual, gain, 1e-5)
        assert torch.equal(found[0], want[0])
        assert torch.equal(found[1], want[1])
    found = ops.linear_add_rms_norm(x, weight, residual, gain, 1e-5)
    want = reference.linear_add_rms_norm(x, weight, residual, gain, 1e-5)
    torch.testing.assert_close(found, want, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gated_product_on_a_cpu_is_its_two_parts(dtype: torch.dtype) -> None:
    """Bit by bit, by whatever computes these: with a bias and packed weights too."""
    x, weight = torch.randn(3, 64, dtype=dtype), torch.randn(96, 64, dtype=dtype) / 8
    bias = torch.randn(96, dtype=dtype)
    packed = ops.pack(weight, "8bit", dtype) if dtype != torch.float64 else weight
    for matrix, add in ((weight, None), (weight, bias), (packed, None), (packed, bias)):
        want = ops.silu_mul(ops.linear(x, matrix, add))
        assert torch.equal(ops.linear_swiglu(x, matrix, add), want)
    found, want = ops.linear_swiglu(x, weight), reference.linear_swiglu(x, weight)
    torch.testing.assert_close(found, want, atol=5e-2, rtol=5e-2)


def test_all_rows_up_to_sixteen_have_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a row's bits are the same; behind the last line is the library."""
    few, more = Tiles(block_n=64, block_k=128, split=4), Tiles(block_n=32, block_k=64)
    monkeypatch.setattr(linear_table, "TABLE", {("linear", 96, 64): {16: few, 64: more}})
    assert [tiles_for("linear", rows, 96, 64) for rows in (1, 2, 15, 16)] == [few] * 4
    assert [tiles_for("linear", rows, 96, 64) for rows in (17, 32, 65)] == [None] * 3
    assert [tiles_for("linear", rows, 96, 64) for rows in (33, 64)] == [more] * 2
    assert tiles_for("linear", 1, 64, 96) is None
    assert tiles_for("linear_f32", 1, 96, 64) is None
