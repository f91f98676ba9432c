"""PyTorch's products in numbers of rows that agree: measured, not believed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from paceline.ops.cpu import rows, tiles
from paceline.ops.cpu.dense import linear, linear_f32
from paceline.ops.cpu.groups import pack_torch
from paceline.ops.packed import quantize
from tests.tolerance import close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COMPANY = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100, 129]


def matrix(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", [(97, 64), (128, 64), (64, 96), (33, 35), (576, 1536), (1, 2)])
def test_a_row_has_the_same_bits_in_any_company(
    n: int, k: int, dtype: torch.dtype, threads: int
) -> None:
    """Decode, verify and prefill agree bit by bit without own kernels too, bias or not."""
    weight, bias = matrix(n, k, dtype), matrix(1, n, dtype, seed=1)[0]
    # Terms of both signs: what is left is rounding, so another order of a sum cannot hide.
    x = rows.vanishing(k, 1, dtype)[0] * torch.randint(1, 9, (130, 1)).to(dtype)
    weight[: n // 2] = rows.vanishing(k, n, dtype)[1][: n // 2]
    torch.set_num_threads(threads)
    try:
        whole, biased = linear(x, weight), linear(x, weight, bias)
        for count in COMPANY:
            for at in (0, 130 - count):
                part = slice(at, at + count)
                assert torch.equal(linear(x[part], weight), whole[part]), count
                assert torch.equal(linear(x[part], weight, bias), biased[part]), count
                assert torch.equal(linear_f32(x[part], weight), whole[part].float()), count
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_product(dtype: torch.dtype) -> None:
    """Padding and cutting lose nothing, for any number of rows, wide matrices and odd strides."""
    for n, k in ((97, 64), (rows._MOST_COLUMNS + 5, 8)):
        weight, bias = matrix(n, k, dtype), matrix(1, n, dtype, seed=1)[0]
        wide = matrix(33, 2 * k, dtype, seed=2)
        for x in (wide[:0, :k], wide[:, :k], wide[:, 1 : k + 1], wide[5:, k:]):
            found = linear(x, weight, bias)
            assert found.shape == (x.shape[0], n)
            if x.shape[0]:
                assert close(found, x.double() @ weight.double().T + bias.double())


def test_the_four_bit_product_of_torch_too() -> None:
    """Where own kernels lack the instructions, groups are torch's: the same promise."""
    groups = quantize(matrix(96, 128, torch.float32), bits=4)
    held = pack_torch(groups, torch.bfloat16)
    assert held is not None
    x = matrix(130, 128, torch.bfloat16, seed=4)
    whole = held.matmul(x)
    assert close(whole, x.double() @ groups.dequantize(torch.float64).T, 5e-3)
    for count in COMPANY:
        assert torch.equal(held.matmul(x[-count:]), whole[-count:]), count


def library(orders: dict[int, int], spoiled: tuple[int, ...] = ()) -> rows.Product:
    """A product that sums in another order for some numbers of rows, or for some rows of a call."""

    def product(x: Tensor) -> Tensor:
        count = x.shape[0]
        out = [functional.linear(r.roll(orders.get(count, 0))[None], torch.ones(1, 8)) for r in x]
        found = torch.cat(out) + 0.0 * count
        found = found + orders.get(count, 0)
        if count in spoiled:
            found[-1] += 1
        return found

    return product


@pytest.mark.parametrize(
    "orders, spoiled, family",
    [
        ({}, (), (1, 2, 4, 8, 16, 64)),
        ({1: 1, 2: 2}, (), (4, 8, 16, 64)),
        ({1: 1, 2: 1, 4: 1, 8: 1, 16: 2, 64: 3}, (), (1, 2, 4, 8)),
        ({}, (16,), (1, 2, 4, 8, 64)),
        ({}, (2, 4, 8, 16, 64), (1,)),
        ({1: 1, 2: 2, 4: 3, 8: 4, 16: 5, 64: 6}, (), (64,)),
    ],
)
def test_only_numbers_that_agree_are_used(
    orders: dict[int, int], spoiled: tuple[int, ...], family: tuple[int, ...]
) -> None:
    """A number of rows that sums otherwise, or not alike for all its rows, is left out."""
    product = library(orders, spoiled)
    assert rows.counts_that_agree(product, torch.zeros(8)) == family
    sizes = []

    def watched(x: Tensor) -> Tensor:
        sizes.append(x.shape[0])
        return product(x)

    x = torch.randn(100, 8)
    whole = rows.by_rows(x, family, watched)
    assert set(sizes) <= set(family)
    assert len({float(rows.by_rows(x[:n], family, product)[0]) for n in (1, 3, 50)}) == 1
    assert whole.shape == (100, 1)


def test_another_order_of_a_sum_shows() -> None:
    """The measurement's inputs tell orders apart that ordinary numbers would seldom tell in 16 bits."""
    for dtype in DTYPES:
        x, weight = rows.vanishing(256, 64, dtype)
        exact = weight.double() @ x.double()
        assert exact.abs().max() < 1e-12
        terms = weight.float() * x.float()
        forward, backward = torch.zeros(64), torch.zeros(64)
        for i in range(256):
            forward += terms[:, i]
            backward += terms[:, -1 - i]
        assert int((forward.to(dtype) != backward.to(dtype)).sum()) > 32, dtype


def test_padding_is_bounded() -> None:
    """A call is never more than half padding where a smaller one would do."""
    counts = (4, 8, 16, 64)
    assert [rows._next(left, counts) for left in (1, 4, 5, 16, 17, 31, 32, 40, 64, 500)] == [
        4, 4, 8, 16, 16, 16, 64, 64, 64, 64
    ]  # fmt: skip


def test_attention_refuses_where_places_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that treats the units of a call differently can't keep the promise, and is named."""
    assert tiles.refusal(48) is None
    tiles._measured.cache_clear()
    multiply = torch.bmm

    def uneven(a: Tensor, b: Tensor) -> Tensor:
        found = multiply(a, b)
        found[-1] += 1e-7
        return found

    monkeypatch.setattr(torch, "bmm", uneven)
    assert "batched product rounds differently" in str(tiles.refusal(48))
    tiles._measured.cache_clear()
