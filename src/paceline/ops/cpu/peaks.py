"""One read of many numbers: the maxima of their blocks, and the logarithm of their exponentials' sum."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.ops.cpu.native import native
from paceline.ops.cpu.threads import kernel_threads
from paceline.ops.reference import peaks as reference

_PART = 2048  # as in peaks.c


def refusal(dtype: torch.dtype) -> str | None:
    """Why there is no own kernel for numbers of this dtype, as a clause."""
    if dtype != torch.float32:
        return f"it is for float32, not for {str(dtype)[6:]}"
    return None if native() is not None else "there are no own kernels here"


def peaks(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.peaks.peaks`."""
    lib = native()
    if lib is None or x.shape[-1] == 0 or x.numel() == 0:
        return reference.peaks(x)
    x = x.contiguous()
    width = x.shape[-1]
    rows = x.numel() // width
    maxima = torch.empty(*x.shape[:-1], width // reference.BLOCK, dtype=x.dtype)
    sums = torch.empty(*x.shape[:-1], -(-width // _PART), dtype=x.dtype)
    lib.peaks(x.data_ptr(), maxima.data_ptr(), sums.data_ptr(), rows, width, kernel_threads())
    return maxima, sums.logsumexp(-1)
