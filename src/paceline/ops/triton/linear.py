"""Products of few rows on a GPU: weights read once, K split among programs, what follows folded in.

    product_kernel     x and the weight in, float32 parts of the product out   one program a block of
                                                                               features and part of K
    join_norm_kernel   parts, the stream in; the new stream and its norm out   one program a row

A product of a row or sixteen takes as long as its weight takes to be read, and cuBLAS's choices for
it leave some of that time unused, the more so where it splits K and adds the parts by another kernel.
Here that addition is the first thing that the norm does. `linear_table` says which products are
computed so; all others are cuBLAS's, and so are those with biases.

Parts are added in one order, and tiles are the same for all numbers of rows up to 16: there a row's
bits do not depend on how many rows there are.

Memory of the parts is allocated at each call. In a captured graph it is the graph's own, at one
address as long as the graph lives, and never another stream's.

Letters: T tokens, N output features, K input features, S parts of K.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.ops import composed
from paceline.ops.cpu.native import needs_grad
from paceline.ops.reference import linear as reference
from paceline.ops.triton import overlap
from paceline.ops.triton.fused import WIDEST
from paceline.ops.triton.linear_kernels import join_norm_kernel, product_kernel
from paceline.ops.triton.linear_table import BLOCKS, CAPABILITY, Tiles, tiles_for
from paceline.ops.triton.sizes import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.linear.linear`."""
    chosen = None if bias is not None else _choice("linear", x, weight)
    if chosen is None or chosen.split != 1:
        return reference.linear(x, weight, bias)
    return parts(x, weight, chosen, x.dtype)[0]


def linear_f32(x: Tensor, weight: Tensor) -> Tensor:
    """See `reference.linear.linear_f32`."""
    chosen = _choice("linear_f32", x, weight)
    if chosen is None or chosen.split != 1:
        return reference.linear_f32(x, weight)
    return parts(x, weight, chosen, torch.float32)[0]


def linear_add_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `reference.linear.linear_add_rms_norm`."""
    chosen = _choice("linear_add_rms_norm", x, weight)
    plain = residual.dtype == x.dtype and residual.ndim == 2 and residual.stride(1) == 1
    plain = plain and norm_weight.is_contiguous() and not needs_grad(residual, norm_weight)
    if chosen is None or not plain or weight.shape[0] > WIDEST:
        return composed.linear_add_rms_norm(x, weight, residual, norm_weight, eps)
    return product_norm(x, weight, residual, norm_weight, eps, chosen)


def product_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """`linear_add_rms_norm` by the kernels, with given tiles.

    Args:
        x: [T, K] bfloat16 or float16, 1 <= T <= 128, its rows without gaps; likewise all others.
        weight: [N, K] in x's dtype, N <= WIDEST.
        residual: [T, N] in x's dtype.
        norm_weight: [N].
        eps: added to the mean square.
        tiles: how to cut the product up.
    """
    partials = parts(x, weight, tiles, torch.float32)
    out, stream = (torch.empty(residual.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    join_norm(partials, residual, norm_weight, eps, out, stream)
    return out, stream


def join_norm(
    partials: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, out: Tensor, stream: Tensor
) -> None:
    """Add the parts of a product in their order, then the stream; write that and its norm.

    Args:
        partials: [S, T, N] float32, from `parts`.
        residual: [T, N], its rows without gaps, N <= WIDEST.
        norm_weight: [N].
        eps: added to the mean square.
        out: [T, N], the norm.
        stream: [T, N], the sum.
    """
    split, rows, width = partials.shape
    block = power_of_two(width)
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        join_norm_kernel[(rows,)](
            partials,
            residual,
            norm_weight,
            out,
            stream,
            rows,
            residual.stride(0),
            eps,
            WIDTH=width,
            BLOCK=block,
            PARTS=split,
            num_warps=min(16, max(4, block // 256)),
            num_stages=1,
            **overlap.between(out),
        )


def parts(x: Tensor, weight: Tensor, tiles: Tiles, dtype: torch.dtype) -> Tensor:
    """Products of x [T, K] and a weight [N, K] over each part of K: [S, T, N] in `dtype`.

    Takes what `product_norm` takes. A part behind the end of K is zero.
    """
    (rows, k), n = x.shape, weight.shape[0]
    block = next(block for block in BLOCKS if rows <= block)
    out = torch.empty((tiles.split, rows, n), dtype=dtype, device=x.device)
    blocks = -(-k // tiles.block_k)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        product_kernel[(-(-n // tiles.block_n), tiles.split)](
            x,
            weight,
            out,
            rows,
            n,
            k,
            -(-blocks // tiles.split),
            x.stride(0),
            weight.stride(0),
            BLOCK_M=block,
            BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k,
            EVEN_N=n % tiles.block_n == 0,
            EVEN_K=k % tiles.block_k == 0,
            SWAP=tiles.swap,
            **overlap.product(x),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out


def _choice(op: str, x: Tensor, weight: Tensor) -> Tiles | None:
    """The table's tiles for a product, if the kernels can take it; None: cuBLAS's."""
    if torch.compiler.is_compiling() or x.ndim != 2 or x.dtype not in DTYPES or not x.shape[0]:
        return None
    tiles = tiles_for(op, x.shape[0], *weight.shape)
    if tiles is None or weight.dtype != x.dtype or needs_grad(x, weight):
        return None
    if x.stride(1) != 1 or weight.stride(1) != 1 or not _measured(x.device):
        return None
    return tiles


def _measured(device: torch.device) -> bool:
    """Whether the table is about GPUs of this kind."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == CAPABILITY
