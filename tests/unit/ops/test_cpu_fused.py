"""Norms, rope, gated activation and cache writes: own kernels against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.ops.cpu import fused
from paceline.ops.cpu.build import built
from paceline.ops.cpu.native import DTYPES, native
from paceline.ops.reference import fused as reference
from tests.tolerance import RELATIVE, close

pytestmark = pytest.mark.skipif(native() is None, reason=f"no own kernels: {built().reason}")
EPS = 1e-5
WIDTHS = [1, 8, 16, 17, 64, 80, 576, 1000]


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_is_the_definition(width: int, dtype: torch.dtype) -> None:
    """All widths, one to three dimensions, weights of the own dtype and of float32."""
    for weight in (normal(width, dtype=dtype, seed=1), normal(width, dtype=torch.float32, seed=1)):
        for shape in ((width,), (3, width), (2, 5, width)):
            x = normal(*shape, dtype=dtype)
            exact = reference.rms_norm(x.double(), weight.double(), EPS)
            found = fused.rms_norm(x, weight, EPS)
            assert found.dtype == dtype
            assert close(found, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm_normalises_the_stored_stream(width: int, dtype: torch.dtype) -> None:
    """The stream is rounded first, and that is what is normed."""
    x, residual = normal(5, width, dtype=dtype), normal(5, width, dtype=dtype, seed=1)
    weight = normal(width, dtype=dtype, seed=2)
    found, stream = fused.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(stream, (x.float() + residual.float()).to(dtype))
    assert close(found, reference.rms_norm(stream.double(), weight.double(), EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 16, 20, 32, 64, 80, 128])
def test_rope_is_the_definition(width: int, dtype: torch.dtype) -> None:
    """All head sizes, on contiguous tensors and on slices of a fused projection."""
    whole = normal(7, 6 * width, dtype=dtype)
    q, k = (part.view(7, -1, width) for part in torch.split(whole, [4 * width, 2 * width], 1))
    positions = torch.tensor([0, 5, 5, 99, 1, 2, 3])
    angles = torch.arange(100)[:, None] * 10.0 ** -torch.arange(width // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    exact = reference.rope(q.double(), k.double(), positions, cos_sin.double())
    for args in ((q, k), (q.contiguous(), k.contiguous())):
        for found, want in zip(fused.rope(*args, positions, cos_sin), exact, strict=True):
            assert found.is_contiguous()
            assert close(found, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul_is_the_definition(width: int, dtype: torch.dtype) -> None:
    """Also for gates far from zero, where exp over- or underflows."""
    x = normal(6, 2 * width, dtype=dtype)
    x[1], x[2], x[3] = x[1] * 20, -90.0, 90.0
    x[4, :width], x[5, :width] = -1e4, 1e4
    found = fused.silu_mul(x)
    assert close(found, reference.silu_mul(x.double()))
    assert found.isfinite().all()


def test_rows_have_the_same_bits_in_any_company() -> None:
    """Also across the size from which rows are shared among threads."""
    torch.set_num_threads(3)
    try:
        x = normal(300, 576, dtype=torch.bfloat16)
        weight = normal(576, dtype=torch.bfloat16, seed=1)
        norm, gate = fused.rms_norm(x, weight, EPS), fused.silu_mul(x)
        both = fused.add_rms_norm(x, x.flip(0), weight, EPS)
        for rows in (1, 2, 7, 33, 100):
            assert torch.equal(fused.rms_norm(x[:rows], weight, EPS), norm[:rows])
            assert torch.equal(fused.silu_mul(x[:rows]), gate[:rows])
            some = fused.add_rms_norm(x[:rows], x.flip(0)[:rows], weight, EPS)
            assert torch.equal(some[0], both[0][:rows])
            assert torch.equal(some[1], both[1][:rows])
    finally:
        torch.set_num_threads(1)


def test_strided_rows_are_read_where_they_are() -> None:
    """Heads of a fused projection are normed without a copy, and to the same bits as a copy."""
    whole = normal(5, 7 * 16, dtype=torch.bfloat16)
    heads = whole[:, 16 : 5 * 16].view(5, 4, 16)
    weight = normal(16, dtype=torch.bfloat16, seed=1)
    want = fused.rms_norm(heads.contiguous(), weight, EPS)
    assert torch.equal(fused.rms_norm(heads, weight, EPS), want)
    assert torch.equal(fused.rms_norm(heads[:, 1], weight, EPS), want[:, 1])
    gates = whole[:, :40]
    assert torch.equal(fused.silu_mul(gates), fused.silu_mul(gates.contiguous()))


def test_what_is_out_of_the_ordinary_is_the_reference() -> None:
    """Gradients, transposed tensors and wide rope tables: right, if slower."""
    with torch.enable_grad():
        x = normal(3, 16, dtype=torch.float32).requires_grad_()
        weight = torch.ones(16)
        (fused.rms_norm(x, weight, EPS).sum() + fused.silu_mul(x).sum()).backward()
        assert x.grad is not None
        y = normal(3, 16, dtype=torch.float32).requires_grad_()
        (reference.rms_norm(y, weight, EPS).sum() + reference.silu_mul(y).sum()).backward()
        assert torch.allclose(x.grad, y.grad)
    across = normal(16, 3, dtype=torch.bfloat16).T
    assert close(
        fused.rms_norm(across, weight, EPS), reference.rms_norm(across.double(), weight, EPS)
    )
    q = normal(2, 3, 16, dtype=torch.float32)
    table = normal(4, 16, dtype=torch.float64)
    found, _ = fused.rope(q, q, torch.tensor([1, 3]), table)
    exact, _ = reference.rope(q.double(), q.double(), torch.tensor([1, 3]), table)
    assert close(found, exact, RELATIVE[torch.float32])


def test_nan_passes_through() -> None:
    """A broken activation is seen, not hidden, and stays in its row."""
    x = normal(3, 64, dtype=torch.bfloat16)
    x[1, 5] = torch.nan
    weight = torch.ones(64, dtype=torch.bfloat16)
    assert fused.rms_norm(x, weight, EPS).isnan().any(1).tolist() == [False, True, False]
    assert fused.silu_mul(x).isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("width", [16, 20])
def test_cache_writes_are_the_reference(width: int, dtype: torch.dtype) -> None:
    """Every slot but the skipped ones; values are read where they are in a fused projection."""
    caches = [normal(2, 12, width, dtype=dtype, seed=s) for s in (0, 1)]
    want = [cache.clone() for cache in caches]
    whole = normal(4, 4 * width, dtype=dtype, seed=2)
    k, v = (part.view(4, 2, width) for part in torch.split(whole, [2 * width] * 2, 1))
    slots = torch.tensor([7, -1, 0, 3])
    fused.kv_write(caches[0], caches[1], slots, k, v)
    for b, (cache, entries) in enumerate(zip(want, (k, v), strict=True)):
        for t, slot in enumerate(slots.tolist()):
            if slot >= 0:
                cache[:, slot] = entries[t]
        assert torch.equal(caches[b][:, :-1], cache[:, :-1])  # the last slot is a dummy


def test_a_cache_of_another_dtype_is_written_all_the_same() -> None:
    """Keys in bfloat16 for a float32 pool are widened."""
    caches = torch.zeros(2, 4, 16), torch.zeros(2, 4, 16)
    k = normal(1, 2, 16, dtype=torch.bfloat16)
    fused.kv_write(*caches, torch.tensor([2]), k, k)
    assert torch.equal(caches[1][:, 2], k[0].float())
