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
from paceline.ops.triton.sizes import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

_CELLS = 64  # blocks of a program


def log_sum_exp(x: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the sum of exponentials of rows x [n, V], any V, as a sum of two numbers.

    Returns:
        [n] float32, about each row's largest number, and [n] float32, the rest. What is subtracted
        from logits near the largest loses no digits if they are subtracted one after the other.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    bases, sums = read_parts(x, None, None, 1)
    rows, parts = bases.shape
    tops, logs = torch.empty(2, rows, dtype=torch.float32, device=x.device)
    if rows:
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            join_kernel[(rows,)](
                bases,
                sums,
                tops,
                logs,
                parts,
                PARTS=power_of_two(parts),
                num_warps=1,
                num_stages=1,
            )
    return tops, logs


def read_parts(
    x: Tensor, maxima: Tensor | None, temperature: Tensor | None, positions: int
) -> tuple[Tensor, Tensor]:
    """Read rows x [n, V], whose numbers lie side by side, once.

    Args:
        x: [n, V].
        maxima: [n, V / 64, rounded up], to be filled with the maxima of blocks: of x itself. A block with
            a NaN has NaN.
        temperature: [n / positions], what x is divided by where it is above 0; None: 1.
        positions: rows of x that share a temperature.

    Returns:
        [n, parts] float32: bases, and the sums of exp((x - base) / temperature) of each part of a row.
    """
    rows, width = x.shape
    parts = max(-(-width // (_CELLS * BLOCK)), 1)
    bases, sums = torch.empty(2, rows, parts, dtype=torch.float32, device=x.device)
    if rows:
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            parts_kernel[(rows, parts)](
                x,
                x if maxima is None else maxima,
                x if temperature is None else temperature,
                bases,
                sums,
                x.stride(0),
                width,
                parts,
                -(-width // BLOCK),
                positions,
                0 if temperature is None else temperature.stride(0),
                MAXIMA=maxima is not None,
                TEMPERED=temperature is not None,
                CELLS=_CELLS,
                CELL=BLOCK,
                num_warps=4,
                num_stages=1,
            )
    return bases, sums
