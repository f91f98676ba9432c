"""Products with dense matrices on a CPU: against float64, and the same bits in any company."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline import ops
from paceline.ops import PackedWeight
from paceline.ops.cpu import dense
from paceline.ops.cpu.build import built
from paceline.ops.cpu.dense import DenseWeight
from paceline.ops.cpu.native import DTYPES, Native, native
from tests.tolerance import RELATIVE, close

# (N, K): the tiny models', odd N, K that no vector divides, the default model's widest.
SHAPES = [(97, 64), (64, 96), (192, 64), (1, 2), (33, 34), (576, 1536), (31, 1056)]
COMPANY = [*range(1, 66), 299, 300]

needs_native = pytest.mark.skipif(native() is None, reason=f"no own kernels: {built().reason}")
_lib = native()


def matrix(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=gen, dtype=torch.float64).to(dtype)


def packed(weight: Tensor) -> PackedWeight:
    result = ops.pack(weight, "auto", weight.dtype)
    assert isinstance(result, PackedWeight)
    return result


# AMX was granted: what the processor does where it is refused is tried, too, for bfloat16.
WAYS = [torch.float32, torch.float16, torch.bfloat16] + ["no tiles"] * bool(_lib and _lib.tiles)
Way = torch.dtype | str
every_way = pytest.mark.parametrize("way", WAYS, ids=str)


def held_in(way: Way, n: int, k: int) -> tuple[Tensor, PackedWeight]:
    """A matrix of the way's dtype, as it is and packed."""
    if isinstance(way, torch.dtype):
        weight = matrix(n, k, way)
        return weight, packed(weight)
    assert _lib is not None
    weight = matrix(n, k, torch.bfloat16)
    return weight, DenseWeight.pack(weight, replace(_lib, tiles=False))


@needs_native
@every_way
@pytest.mark.parametrize("n, k", SHAPES)
def test_dense_product_is_the_exact_one_rounded(n: int, k: int, way: Way) -> None:
    """Every tile height, odd sizes and the bias, against float64 within the dtype's tolerance."""
    weight, held = held_in(way, n, k)
    dtype = weight.dtype
    bias = matrix(1, n, dtype, seed=1)[0]
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
@every_way
@pytest.mark.parametrize("n, k", [(97, 64), (960, 576), (33, 34), (49, 98)])
def test_a_row_has_the_same_bits_in_any_company(n: int, k: int, way: Way) -> None:
    """One row (decode), some (verify) and 300 (prefill) agree bit by bit: losslessness rests on it."""
    weight, held = held_in(way, n, k)
    x = matrix(300, k, weight.dtype, seed=3)
    every, wide = ops.linear(x, held), ops.linear_f32(x, held)
    for rows in COMPANY:
        at = 300 - rows
        assert torch.equal(ops.linear(x[at:], held), every[at:]), rows
        assert torch.equal(ops.linear_f32(x[at:], held), wide[at:]), rows


def one_by_one(x: Tensor, weight: Tensor) -> Tensor:
    """A sum per output that runs over the features in order."""
    sums = torch.zeros(x.shape[0], weight.shape[0])
    for i in range(x.shape[1]):  # exact in float64, so that only the sum is rounded
        sums = (x[:, i : i + 1].double() * weight[:, i].double() + sums).float()
    return sums


def by_tiles(x: Tensor, weight: Tensor) -> Tensor:
    """Per 32 features, the even ones' sum and the odd ones', each in order, added to the output."""
    sums = torch.zeros(x.shape[0], weight.shape[0])
    for i in range(0, x.shape[1], 32):
        at = slice(i, i + 32)
        even = one_by_one(x[:, at][:, ::2], weight[:, at][:, ::2])
        sums = sums + (even + one_by_one(x[:, at][:, 1::2], weight[:, at][:, 1::2]))
    return sums


def parts_of(x: Tensor, weight: Tensor, lib: Native) -> list[tuple[Tensor, Tensor]]:
    """What to multiply, with the sums [T, N] that the law of the dtype's arithmetic gives.

    How AVX512-BF16 rounds within a pair of features is not written down. Where one of the two is
    zero nothing is left to round there, and the sum over the other runs in order.
    """
    if not (lib.pairs and weight.dtype == torch.bfloat16):
        return [(x, one_by_one(x, weight))]
    if lib.tiles:
        return [(x, by_tiles(x, weight))]
    halves = [x.clone(), x.clone()]
    for i, half in enumerate(halves):
        half[:, i::2] = 0
    return [(half, one_by_one(half, weight)) for half in halves]


@needs_native
@every_way
def test_sums_run_in_one_order(way: Way) -> None:
    """Step by step, the law that all tiles, spans and numbers of rows keep."""
    for n, k in ((49, 70), (33, 1106)):  # a border of spans within, and half a step at the end
        weight, held = held_in(way, n, k)
        assert isinstance(held, DenseWeight)
        for x, sums in parts_of(matrix(33, k, weight.dtype, seed=1), weight, held.lib):
            for rows in (1, 2, 3, 6, 7, 8, 13, 16, 17, 33):
                assert torch.equal(ops.linear_f32(x[:rows], held), sums[:rows]), (n, k, rows)


REFUSED = """
import ctypes, sys, torch
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(8192)
small = Stack(ctypes.addressof(room), 0, len(room))
if sys.platform == "linux":
    assert ctypes.CDLL(None).sigaltstack(ctypes.byref(small), None) == 0
from paceline.ops.cpu.dense import DenseWeight
from paceline.ops.cpu.native import native
weight = DenseWeight.pack(torch.eye(64, dtype=torch.bfloat16), native())
x = torch.arange(3 * 64).view(3, 64).bfloat16()
assert torch.equal(weight.matmul(x), x)
print(native().tiles, weight.kind)
"""


@needs_native
def test_a_system_that_refuses_tiles_is_obeyed() -> None:
    """Linux refuses AMX to a process whose stack for signals can't hold tiles. What is left is what a
    processor without tiles has: AVX512-BF16 where there are pairs, else float32 arithmetic.
    """
    assert _lib is not None
    left = DenseWeight.pack(matrix(3, 4, torch.bfloat16), replace(_lib, tiles=False)).kind
    assert ("AVX512-BF16" in left) == _lib.pairs
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], check=False, capture_output=True, text=True
    )
    assert done.stdout.strip() == f"False {left}", done.stderr


@needs_native
def test_tiles_are_used_where_they_are_granted() -> None:
    """And nowhere else: other dtypes have no pairs."""
    assert _lib is not None
    ways = {dtype: DenseWeight.pack(matrix(3, 4, dtype), _lib).kind for dtype in DTYPES}
    assert ("AMX" in ways.pop(torch.bfloat16)) == _lib.tiles
    assert all("float32 arithmetic" in kind for kind in ways.values())
    assert _lib.pairs or not _lib.tiles


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
    assert held.rows(torch.tensor([97, -1])).isnan().all(), "no such rows"
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
