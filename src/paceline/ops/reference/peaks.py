"""Maxima of blocks and the logarithm of the sum of exponentials: the definition."""

from __future__ import annotations

from typing import Final

from torch import Tensor

BLOCK: Final = 64  # numbers of one maximum


def peaks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maxima [..., V / 64] of blocks of 64, and the log of the sum of exponentials [...].

    Args:
        x: [..., V], V a multiple of 64. A block with a NaN has any maximum.
    """
    cut = x.view(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    return cut.amax(-1), x.logsumexp(-1)
