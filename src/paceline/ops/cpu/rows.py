"""PyTorch's products, called so that a row's bits depend on that row alone.

A library takes another kernel, and with it another order of summation, for another number of rows. For
which numbers it sums alike is promised nowhere and differs between processors, so it is measured, once
for each shape: inputs whose exact product is zero leave nothing but the rounding of the sums, and that
tells any two orders apart. Rows then go in numbers that agree, padded with zeros where they must be. In
the worst case that is one at a time.

Letters: T tokens, K/N input/output features, m rows of a call.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, get_num_threads
from torch.nn import functional

COUNTS = (1, 2, 4, 8, 16, 64)  # rows of a call that are tried
_MOST_COLUMNS = 8192  # of a call: bounds what a measurement allocates
_ALIGN = 64  # bytes; a library may treat other addresses differently

Product = Callable[[Tensor], Tensor]  # [m, K] -> [m, N]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: x [T, K], weight [N, K] -> [T, N], in 16 or 32 bits without gradients."""
    n, k = weight.shape
    if n > _MOST_COLUMNS:
        starts = range(0, n, _MOST_COLUMNS)
        slices = [slice(start, start + _MOST_COLUMNS) for start in starts]
        parts = [linear(x, weight[s], None if bias is None else bias[s]) for s in slices]
        return torch.cat(parts, dim=1)
    counts = agreeing(k, n, x.dtype, bias is not None, get_num_threads())
    return by_rows(x, counts, lambda part: functional.linear(part, weight, bias))


def by_rows(x: Tensor, counts: tuple[int, ...], product: Product) -> Tensor:
    """Apply a product to x [T, K] in calls of `counts` rows (ascending)."""
    if x.shape[0] == 0:
        return product(x.new_zeros(counts[0], x.shape[1]))[:0]
    outs = []
    start, total = 0, x.shape[0]
    while start < total:
        count = _next(total - start, counts)
        part = x[start : start + count]
        missing = count - part.shape[0]
        if missing:
            part = functional.pad(part, (0, 0, 0, missing))
        elif not part.is_contiguous() or part.data_ptr() % _ALIGN:
            part = part.clone(memory_format=torch.contiguous_format)
        outs.append(product(part)[: count - missing])
        start += count
    return torch.cat(outs) if len(outs) != 1 else outs[0]


def _next(left: int, counts: tuple[int, ...]) -> int:
    """Rows of the next call: all that are left in one, unless more than half of it were padding."""
    enough = next((count for count in counts if count >= left), counts[-1])
    smaller = [count for count in counts if count <= left]
    return smaller[-1] if smaller and enough > 2 * left else enough


@functools.cache
def agreeing(k: int, n: int, dtype: torch.dtype, has_bias: bool, threads: int) -> tuple[int, ...]:
    """Numbers of rows, ascending, for which `functional.linear` gives a row the same bits.

    Args:
        k: input features.
        n: output features.
        dtype: of both.
        has_bias: whether a bias is added in the same call.
        threads: PyTorch's; part of the key only, as the caller's setting is in force.
    """
    del threads
    x, weight = vanishing(k, n, dtype)
    bias = torch.zeros(n, dtype=dtype) if has_bias else None
    return counts_that_agree(lambda rows: functional.linear(rows, weight, bias), x)


def vanishing(k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [K] and weight [N, K] whose product is zero but for rounding.

    Each term comes with both signs, and terms are of different sizes: sums of like numbers of 16 bits
    would be exact in 32.
    """
    gen = torch.Generator().manual_seed(k)
    half = k // 2
    order = torch.randperm(half, generator=gen)
    x, weight = torch.zeros(k, dtype=dtype), torch.zeros(n, k, dtype=dtype)
    some = torch.randn(half, generator=gen).to(dtype)
    some *= 2.0 ** torch.randint(-6, 7, (half,), generator=gen)
    x[:half], x[half : 2 * half] = some, some[order]
    rows = torch.randn(min(n, 61), half, generator=gen).to(
        dtype
    )  # a prime: no block repeats itself
    rows = rows.repeat(-(-n // rows.shape[0]), 1)[:n]
    weight[:, :half], weight[:, half : 2 * half] = rows, -rows[:, order]
    return x, weight


def counts_that_agree(product: Product, x: Tensor) -> tuple[int, ...]:
    """The largest family of `COUNTS` in which every row x [K] of a call has one and the same result."""
    families: defaultdict[bytes, list[int]] = defaultdict(list)
    for count in COUNTS:
        found = product(x.expand(count, -1).contiguous()).float()
        if bool((found == found[0]).all()):
            families[found[0].contiguous().numpy().tobytes()].append(count)
    best = max(families.values(), key=lambda family: (len(family), family[-1]))
    return tuple(best)
