"""One read of many numbers on a GPU: maxima of blocks, and the logarithm of their exponentials' sum.

A program reads 64 blocks of 64. Parts lie at fixed places and are joined in one order, so a row's bits
are the same alone and in company.

Letters: n rows, V numbers a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.ops.reference.peaks import BLOCK
from paceline.ops.triton.peaks_kernels import join_kernel, parts_kernel

if TYPE_CHECKING:
    from torch import Tensor

_CELLS = 64  # blocks of a program


def peaks(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.peaks.peaks`."""
    width = x.shape[-1]
    maxima = x.new_empty((*x.shape[:-1], width // BLOCK))
    tops, logs = _read(x.reshape(-1, width), maxima)
    return maxima, (tops + logs).view(x.shape[:-1]).to(x.dtype)


def log_sum_exp(x: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the sum of exponentials of rows x [n, V], any V, as a sum of two numbers.

    Returns:
        [n] float32, about each row's largest number, and [n] float32, the rest. What is subtracted
        from logits near the largest loses no digits if they are subtracted one after the other.
    """
    return _read(x, None)


def _read(x: Tensor, maxima: Tensor | None) -> tuple[Tensor, Tensor]:
    """`log_sum_exp`, and the blocks' maxima where there is a place for them."""
    rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    parts = max(-(-width // (_CELLS * BLOCK)), 1)
    # float32, [n, parts] each: bases, sums; [n]: tops, logs
    bases, sums = torch.empty(2, rows, parts, dtype=torch.float32, device=x.device)
    tops, logs = torch.empty(2, rows, dtype=torch.float32, device=x.device)
    if rows:
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            parts_kernel[(rows, parts)](
                x,
                x if maxima is None else maxima,
                bases,
                sums,
                x.stride(0),
                width,
                parts,
                width // BLOCK,
                MAXIMA=maxima is not None,
                CELLS=_CELLS,
                CELL=BLOCK,
                num_warps=4,
                num_stages=1,
            )
            join_kernel[(rows,)](
                bases,
                sums,
                tops,
                logs,
                parts,
                PARTS=1 << (parts - 1).bit_length(),
                num_warps=1,
                num_stages=1,
            )
    return tops, logs
