"""Products whose bits depend on a row alone, for any number of rows: one tile and one loop over K.

    product_kernel     x and the weight in; the product, or float32 parts of it   a program 64 rows, a
                                                                                  block of features and
                                                                                  a part of K
    join_norm_kernel   parts, the stream in; the new stream and its norm out      a program a row

A library chooses tiles, and with them the order of a sum, by the number of rows. Here the weight's sizes
alone choose them (`tiles_for`): a row is one of 64 in a program, whether the others exist or not, and
passes through the same instructions in the same order. Further rows are further programs. What few rows
lose by it is small, since reading the weight is what they take; a prompt loses more.

Letters: T tokens, N output features, K input features, S parts of K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from paceline.ops.triton.fused import WIDEST, add_rms_norm
from paceline.ops.triton.linear import join_norm
from paceline.ops.triton.product_invariant_kernels import product_kernel

if TYPE_CHECKING:
    from torch import Tensor

_ROWS: Final = 64  # of a program
_JOINED_ROWS: Final = 2048  # whose parts exist at once
_PROGRAMS: Final = 256  # that K is split for: two for each multiprocessor of a large GPU
_LEAST_K: Final = 1024  # of a part


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How a product is cut up; the same for every number of rows."""

    block_n: int  # output features of a program
    block_k: int  # input features at once
    num_stages: int  # blocks on their way at once
    split: int  # parts of K, where they are joined by a norm


def tiles_for(n: int, k: int) -> Tiles:
    """Choose the tiles of a weight [N, K]."""
    if n >= 16_384:
        block_n, stages = 128, 4
    elif n >= 2048:
        block_n, stages = 64, 6
    else:
        block_n, stages = 32, 6
    columns = -(-n // block_n)
    split = max(1, min(4, _PROGRAMS // columns, k // _LEAST_K))
    return Tiles(block_n=block_n, block_k=64, num_stages=stages, split=split)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.linear.linear`; bfloat16 or float16, no gradients."""
    return _product(x, weight, bias, x.dtype, 1)[0]


def linear_f32(x: Tensor, weight: Tensor) -> Tensor:
    """See `reference.linear.linear_f32`; bfloat16 or float16, no gradients."""
    return _product(x, weight, None, torch.float32, 1)[0]


def linear_add_rms_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `ops.linear_add_rms_norm`; bfloat16 or float16, no gradients."""
    (n, k), rows = weight.shape, x.shape[0]
    split = tiles_for(n, k).split
    if split == 1 or bias is not None or n > WIDEST:
        return add_rms_norm(linear(x, weight, bias), residual, norm_weight, eps)
    residual, norm_weight = residual.contiguous(), norm_weight.contiguous()
    out, stream = (torch.empty((rows, n), dtype=x.dtype, device=x.device) for _ in range(2))
    for start in range(0, rows, _JOINED_ROWS):
        part = slice(start, min(start + _JOINED_ROWS, rows))
        partials = _product(x[part], weight, None, torch.float32, split)
        join_norm(partials, residual[part], norm_weight, eps, out[part], stream[part])
    return out, stream


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, split: int
) -> Tensor:
    """Products of x [T, K] and a weight [N, K] over each part of K: [S, T, N]; a bias is for S = 1."""
    (rows, k), n = x.shape, weight.shape[0]
    assert x.dtype == weight.dtype, "a weight is of its activations' type"
    assert weight.stride(1) == 1, "features of a weight lie side by side"
    tiles = tiles_for(n, k)
    x = x if x.is_contiguous() else x.contiguous()
    out = torch.empty((split, rows, n), dtype=dtype, device=x.device)
    if rows == 0:
        return out
    row_blocks, steps = -(-rows // _ROWS), -(-k // tiles.block_k)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        product_kernel[(row_blocks * -(-n // tiles.block_n), split)](
            x,
            weight,
            weight if bias is None else bias,
            out,
            rows,
            row_blocks,
            n,
            k,
            -(-steps // split),
            k,
            weight.stride(0),
            BLOCK_M=_ROWS,
            BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k,
            EVEN_N=n % tiles.block_n == 0,
            EVEN_K=k % tiles.block_k == 0,
            HAS_BIAS=bias is not None,
            num_warps=4,
            num_stages=tiles.num_stages,
        )
    return out
