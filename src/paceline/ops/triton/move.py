"""Make accepted paths contiguous in a cache, all layers in one kernel; chains cost a look at their path.

The definition is `ops.reference.verify.move_paths`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.ops.triton.move_kernels import move_kernel
from paceline.ops.triton.tree import block

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024  # numbers of an entry that a program moves, at most


def move_paths(
    caches: tuple[Tensor, Tensor],
    path: Tensor,
    rows: Tensor,
    lens: Tensor,
    pages: Tensor,
    *,
    page_size: int,
    dummy_page: int,
) -> None:
    """See `ops.reference.verify.move_paths`; for keys and values that lie alike."""
    k, v = caches
    assert k.stride() == v.stride(), "keys and values lie alike"
    assert k.stride(3) == 1, "an entry is contiguous"
    layers, heads, _, dim = k.shape
    batch, width = path.shape
    size = min(_BLOCK, block(heads * dim))
    with torch.cuda.device_of(k):  # type: ignore[no-untyped-call]
        move_kernel[batch, layers, -(-heads * dim // size)](
            k,
            v,
            path.contiguous(),
            rows.contiguous(),
            lens.contiguous(),
            pages,
            pages.shape[0] - 1,
            width,
            pages.stride(0),
            pages.shape[1],
            dummy_page,
            k.stride(0),
            k.stride(1),
            k.stride(2),
            HEADS=heads,
            DIM=dim,
            PAGE=page_size,
            BLOCK_A=block(width),
            BLOCK=size,
            num_warps=4,
        )
