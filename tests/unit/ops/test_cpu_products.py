"""Products with dense matrices on a CPU: against float64, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline import ops
from paceline.ops import PackedWeight
from paceline.ops.cpu import dense
from paceline.ops.cpu.build import built
from paceline.ops.cpu.native import DTYPES, native
from tests.tolerance import RELATIVE, close

# (N, K): the tiny models', odd N, K that no vector divides, the default model's widest.
SHAPES = [(97, 64), (64, 96), (192, 64), (1, 2), (33, 34), (576, 1536), (31, 1056)]
COMPANY = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25, 31, 32, 33, 299, 300]

needs_native = pytest.mark.skipif(native() is None, reason=f"no own kernels: {built().reason}")
_lib = native()


def matrix(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=gen, dtype=torch.float64).to(dtype)


def packed(weight: Tensor) -> PackedWeight:
    result = ops.pack(weight, "auto", weight.dtype)
    assert isinstance(result, PackedWeight)
    return result


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", SHAPES)
def test_dense_product_is_the_exact_one_rounded(n: int, k: int, dtype: torch.dtype) -> None:
    """Every tile height, odd sizes and the bias, against float64 within the dtype's tolerance."""
    weight, bias = matrix(n, k, dtype), matrix(1, n, dtype, seed=1)[0]
    held = packed(weight)
    assert held.shape == (n, k)
    for rows in (1, 2, 3, 5, 7, 11, 12, 13, 40):
        x = matrix(rows, k, dtype, seed=2)
        exact = x.double() @ weight.double().T
        assert close(ops.linear(x, held), exact), rows
        assert close(ops.linear(x, held, bias), exact + bias.double()), rows
        found = ops.linear_f32(x, held)
        assert found.dtype == torch.float32
        assert close(found, exact, RELATIVE[torch.float32]), rows


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", [(97, 64), (960, 576), (33, 34)])
def test_a_row_has_the_same_bits_in_any_company(n: int, k: int, dtype: torch.dtype) -> None:
    """One row (decode), some (verify) and 300 (prefill) agree bit by bit: losslessness rests on it."""
    held, x = packed(matrix(n, k, dtype)), matrix(300, k, dtype, seed=3)
    every, wide = ops.linear(x, held), ops.linear_f32(x, held)
    for rows in COMPANY:
        at = 300 - rows
        assert torch.equal(ops.linear(x[at:], held), every[at:]), rows
        assert torch.equal(ops.linear_f32(x[at:], held), wide[at:]), rows


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_run_over_the_features_in_order(dtype: torch.dtype) -> None:
    """In float32 arithmetic, step by step: the law that all tiles and spans keep, on every machine."""
    assert _lib is not None
    if _lib.pairs and dtype == torch.bfloat16:
        pytest.skip("the processor multiplies bfloat16 in pairs")
    for n, k in ((49, 70), (33, 1105)):  # a border of spans within
        weight, x = matrix(n, k, dtype), matrix(13, k, dtype, seed=1)
        sums = torch.zeros(13, n, dtype=torch.float64)
        for i in range(k):  # the product is exact in float64, so that only the sum is rounded
            sums = (x[:, i : i + 1].double() * weight[:, i].double() + sums).float().double()
        held = packed(weight)
        for rows in (1, 2, 3, 6, 7, 8, 13):
            assert torch.equal(ops.linear_f32(x[:rows], held), sums[:rows].float()), (n, k, rows)


@needs_native
def test_bits_do_not_depend_on_threads_or_strides() -> None:
    """A slice of a wider tensor and more threads give what one thread gives for a copy."""
    held, wide = packed(matrix(640, 96, torch.bfloat16)), matrix(9, 200, torch.bfloat16, seed=1)
    x = wide[:, 50:146]
    one = ops.linear(x.contiguous(), held)
    assert torch.equal(ops.linear(x, held), one)
    assert torch.equal(ops.linear(wide.T.contiguous().T[:, 50:146], held), one)
    torch.set_num_threads(4)
    try:
        for _ in range(20):
            assert torch.equal(ops.linear(x, held), one)
    finally:
        torch.set_num_threads(1)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_weights_come_back_bit_by_bit(dtype: torch.dtype) -> None:
    """Look-ups and saving read the matrix that was packed, not a rounded one."""
    weight = matrix(97, 66, dtype)
    held = packed(weight)
    ids = torch.tensor([96, 0, 31, 32, 32])
    assert torch.equal(held.rows(ids), weight[ids])
    back = held.plain()
    assert back is not None
    assert torch.equal(back, weight)
    assert held.dtype == dtype
    assert held.nbytes == (128 if _lib and _lib.columns == 32 else 112) * 66 * dtype.itemsize


@needs_native
def test_other_dtypes_and_gradients_go_to_torch() -> None:
    """A float64 activation is multiplied in float64, and autograd is told of what it asks about."""
    weight = matrix(40, 32, torch.bfloat16)
    held, x = packed(weight), matrix(3, 32, torch.float64, seed=1)
    assert close(ops.linear(x, held), x @ weight.double().T)
    with torch.enable_grad():
        asks = matrix(3, 32, torch.bfloat16, seed=1).requires_grad_()
        ops.linear(asks, held).sum().backward()
    assert asks.grad is not None
    assert torch.allclose(asks.grad.double(), weight.double().sum(0).expand(3, -1), atol=0.1)


@needs_native
def test_what_no_kernel_takes_stays_plain() -> None:
    """float64, and an odd number of features in pairs, are torch's; the product is right all the same."""
    assert isinstance(ops.pack(matrix(8, 6, torch.float64), "auto", torch.float64), Tensor)
    odd = ops.pack(matrix(8, 7, torch.bfloat16), "auto", torch.bfloat16)
    x = matrix(5, 7, torch.bfloat16, seed=1)
    assert close(ops.linear(x, odd), x.double() @ matrix(8, 7, torch.bfloat16).double().T)


@needs_native
def test_nothing_is_computed_for_no_rows() -> None:
    """An empty pass is legal and has an empty result."""
    held = packed(matrix(40, 32, torch.bfloat16))
    assert ops.linear(torch.empty(0, 32, dtype=torch.bfloat16), held).shape == (0, 40)
    assert held.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 32)


@needs_native
def test_nan_stays_in_its_row() -> None:
    """A dead token may carry NaN; its neighbours in the tile must not see it."""
    held, x = packed(matrix(40, 64, torch.bfloat16)), matrix(6, 64, torch.bfloat16, seed=1)
    clean = ops.linear(x, held)
    x[2] = torch.nan
    found = ops.linear(x, held)
    assert found[2].isnan().all()
    keep = torch.tensor([0, 1, 3, 4, 5])
    assert torch.equal(found[keep], clean[keep])


def test_torch_products_are_batch_invariant_in_16_bits() -> None:
    """Plain bfloat16 matrices: a row alone is doubled, many go in sixteens."""
    weight, x = matrix(96, 64, torch.bfloat16), matrix(40, 64, torch.bfloat16, seed=1)
    every = dense.linear(x, weight)
    assert close(every, x.double() @ weight.double().T)
    for rows in (1, 2, 3, 8, 16, 17, 33):
        assert torch.equal(dense.linear(x[40 - rows :], weight), every[40 - rows :]), rows
    assert dense.linear_f32(x, weight).dtype == torch.float32
