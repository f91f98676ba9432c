"""RMSNorm, alone and fused with the residual addition before it.

Letters: T tokens, H hidden size, D normed size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline import ops


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang & Sennrich, arXiv 1910.07467).

    Args:
        size: D.
        eps: added to the mean square.
        dtype: of the parameter.
        device: where it lives.
    """

    weight: Tensor

    def __init__(
        self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))

    if TYPE_CHECKING:  # nn.Module's own returns Any

        def __call__(self, x: Tensor) -> Tensor:
            """See `forward`."""

    def forward(self, x: Tensor) -> Tensor:
        """Norm [..., D] over its last dimension."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual), both [T, H].

        Args:
            x: [T, H], what the last block adds.
            residual: [T, H], the stream before it.
        """
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
