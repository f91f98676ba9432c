"""Products with groups on a CPU: against float64, against their own law bit by bit, in any company."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline import ops
from paceline.ops import quantize
from paceline.ops.cpu import groups
from paceline.ops.cpu import native as loading
from paceline.ops.cpu.build import build, find_compiler
from paceline.ops.cpu.native import native
from tests.tolerance import INT8_ACTIVATIONS, close

COMPANY = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25, 31, 32, 33, 299, 300]

_lib = native()
needs_groups = pytest.mark.skipif(
    _lib is None or not _lib.groups, reason="needs a C compiler and products of bytes"
)


def matrix(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=gen, dtype=torch.float64).to(dtype)


def kinds(n: int, k: int) -> dict[str, ops.Groups]:
    """Quantised matrices of every kind that files have."""
    weight = matrix(n, k, torch.float32)
    q41, q80 = quantize(weight, bits=4), quantize(weight, bits=8)
    scales = q41.scales.float()
    return {
        "q4_1": q41,
        "q4_0": ops.Groups(codes=q41.codes, scales=scales, mins=scales * -8, size=32, bits=4),
        "signed 4": ops.Groups(
            codes=q41.codes.to(torch.int8) - 8, scales=scales, mins=None, size=32, bits=4
        ),
        "q8_0": q80,
        "unsigned 8": ops.Groups(
            codes=(q80.codes.to(torch.int16) + 128).to(torch.uint8),
            scales=q80.scales.float() * 1.0001,  # not a float16
            mins=q80.scales.float() * -128,
            size=32,
            bits=8,
        ),
    }


def single(value: Tensor) -> Tensor:
    """Rounded to float32, still as float64."""
    return value.float().double()


def law(x: Tensor, weight: ops.Groups) -> Tensor:
    """x @ weight.T as every kernel must compute it, step by step, in float32: [T, K] -> [T, N].

    Products of two float32 are exact in float64, and so are the integer sums, so that each line
    rounds where the kernels do.
    """
    rows = x.double().view(x.shape[0], -1, 32)
    codes = weight.codes.double().view(weight.shape[0], -1, 32)
    scales, mins = weight.scales.double(), weight.mins
    if mins is not None and torch.equal(mins.double(), scales * -8):
        codes, mins = codes - 8, None
    most = rows.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 1e-30, single(127.0 / most), 0.0)
    whole = single(rows * inverse + 12582912.0) - 12582912.0  # rounds half to even
    sizes = torch.where(inverse > 0, single(most / 127.0), 0.0)
    out = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for g in range(rows.shape[1]):
        part = single(whole[:, g] @ codes[:, g].T * sizes[:, g])
        out = single(part * scales[:, g] + out)
        if mins is not None:
            total = single(whole[:, g].sum(-1, keepdim=True) * sizes[:, g])
            out = single(total * mins.double()[:, g] + out)
    return out.float()


@needs_groups
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", list(kinds(16, 32)))
def test_group_product_is_the_law_bit_by_bit(kind: str, dtype: torch.dtype) -> None:
    """So processors with other instructions agree: each is held to the same bits."""
    assert _lib is not None
    for n, k in ((97, 64), (33, 1056)):
        weight = kinds(n, k)[kind]
        held = groups.GroupWeight.pack(weight, dtype, _lib)
        for rows in (1, 2, 3, 4, 5, 13):
            x = matrix(rows, k, dtype, seed=rows)
            x[0, 32:64] = 0
            assert torch.equal(held.matmul_f32(x), law(x, weight)), (n, k, rows)


@needs_groups
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_are_exact(bits: int, sign: int) -> None:
    """Every code and every activation at its limit: nothing saturates in between."""
    assert _lib is not None
    top = 15 if bits == 4 else 255
    weight = ops.Groups(
        codes=torch.full((17, 64), top, dtype=torch.uint8),
        scales=torch.ones(17, 2),
        mins=torch.zeros(17, 2),
        size=32,
        bits=bits,
    )
    held = groups.GroupWeight.pack(weight, torch.float32, _lib)
    for rows in (1, 4):
        x = torch.full((rows, 64), 127.0 * sign)
        assert (held.matmul_f32(x) == 64 * top * 127 * sign).all()


@needs_groups
@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 processor")
def test_older_processors_have_the_same_bits(cache_dir: Path) -> None:
    """Code for AVX2 alone gives what this processor's own gives."""
    assert _lib is not None
    result = build(cache_dir / "portable", tuning=("-march=x86-64-v3",))
    assert result.path is not None, result.reason
    older = loading.load(result.path)
    assert older.groups == "AVX2"
    for kind in kinds(16, 32):
        weight = kinds(97, 96)[kind]
        for dtype in loading.DTYPES:
            x = matrix(9, 96, dtype)
            mine, theirs = (
                groups.GroupWeight.pack(weight, dtype, lib).matmul(x) for lib in (_lib, older)
            )
            assert torch.equal(mine, theirs), kind


@needs_groups
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", list(kinds(16, 32)))
@pytest.mark.parametrize("n, k", [(97, 64), (192, 96), (576, 1536), (1, 32)])
def test_group_product_is_off_by_its_activations_only(
    n: int, k: int, kind: str, dtype: torch.dtype
) -> None:
    """All formats and tile heights: codes and scales are exact, activations are int8."""
    weight = kinds(n, k)[kind]
    held = ops.pack(weight, "auto", dtype)
    assert isinstance(held, groups.GroupWeight)
    exact_weight = weight.dequantize(torch.float64)
    bias = matrix(1, n, dtype, seed=4)[0]
    for rows in (1, 2, 5, 12, 13, 30):
        x = matrix(rows, k, dtype, seed=2)
        if n > 1:
            assert close(ops.linear_f32(x, held), x.double() @ exact_weight.T, INT8_ACTIVATIONS)
        # Rounded as the kernel rounds them, the activations give the product to float32 accuracy.
        wide = x.float().view(rows, -1, 32)
        most = wide.abs().amax(-1, keepdim=True)
        codes = (wide.double() * torch.div(torch.tensor(127.0), most).double()).round() * (
            most / 127
        ).double()
        exact = codes.view(rows, k) @ exact_weight.T
        assert close(ops.linear_f32(x, held), exact, 1e-5), rows
        assert close(ops.linear(x, held, bias), exact + bias.double()), rows


@needs_groups
@pytest.mark.parametrize("kind", list(kinds(16, 32)))
def test_group_rows_have_the_same_bits_in_any_company(kind: str) -> None:
    """As for dense weights: 1 to 300 rows agree bit by bit."""
    held = ops.pack(kinds(97, 96)[kind], "auto", torch.bfloat16)
    x = matrix(300, 96, torch.bfloat16, seed=3)
    every = ops.linear_f32(x, held)
    for rows in COMPANY:
        assert torch.equal(ops.linear_f32(x[300 - rows :], held), every[300 - rows :]), rows


@needs_groups
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", list(kinds(16, 32)))
def test_group_look_ups_are_the_dequantised_rows(kind: str, dtype: torch.dtype) -> None:
    """A packed tied table serves as embedding: rows come out rounded once from float32."""
    weight = kinds(97, 64)[kind]
    held = ops.pack(weight, "auto", dtype)
    assert not isinstance(held, Tensor)
    ids = torch.tensor([0, 96, 15, 16, 16])
    assert torch.equal(held.rows(ids), weight.rows(ids).dequantize(dtype))
    assert held.plain() is None
    assert held.shape == (97, 64)


@needs_groups
def test_odd_activations_stay_in_their_row() -> None:
    """Zeros give zeros; an infinity or NaN gives NaN in its own row and nothing elsewhere."""
    held = ops.pack(kinds(40, 64)["q4_1"], "auto", torch.bfloat16)
    x = matrix(5, 64, torch.bfloat16, seed=1)
    clean = ops.linear(x, held)
    x[1], x[2, 3], x[3, 40] = 0, torch.inf, torch.nan
    found = ops.linear(x, held)
    assert (found[1] == 0).all()
    assert found[2:4].isnan().all()
    assert torch.equal(found[0], clean[0])
    assert torch.equal(found[4], clean[4])


def test_torch_int4_is_right_and_batch_invariant() -> None:
    """The path of machines without own kernels: scales rounded to bfloat16, rows independent."""
    x = matrix(40, 64, torch.bfloat16, seed=1)
    for kind in ("q4_1", "q4_0", "signed 4"):
        weight = kinds(96, 64)[kind]
        held = groups.pack_torch(weight, torch.bfloat16)
        assert held is not None
        every = held.matmul(x)
        exact = x.double() @ weight.dequantize(torch.float64).T
        assert close(every, exact, 6e-3)
        for rows in (1, 2, 3, 8, 15, 16, 17, 33):
            assert torch.equal(held.matmul(x[40 - rows :]), every[40 - rows :]), rows
        ids = torch.tensor([5, 0])
        assert torch.equal(held.rows(ids), weight.rows(ids).dequantize(torch.bfloat16))
        bias = matrix(1, 96, torch.bfloat16, seed=7)[0]
        assert torch.equal(held.matmul(x, bias), every + bias)
        assert held.matmul_f32(x).dtype == torch.float32
    assert groups.pack_torch(kinds(97, 64)["q4_1"], torch.bfloat16) is None
    assert groups.pack_torch(kinds(96, 64)["q8_0"], torch.bfloat16) is None
