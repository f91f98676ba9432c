"""MLP: the gated feed-forward block (SwiGLU, Shazeer, arXiv 2002.05202).

Letters: T tokens, H hidden size, I intermediate size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline import ops
from paceline.layers.linear import Linear

if TYPE_CHECKING:
    from paceline.core.config import ModelConfig


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up as one product.

    Args:
        config: sizes and whether there are biases.
        dtype: of the parameters.
        device: where they live.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(hidden, inner, inner, bias=bias, dtype=dtype, device=device)
        self.down = Linear(inner, hidden, bias=bias, dtype=dtype, device=device)

    if TYPE_CHECKING:  # nn.Module's own returns Any

        def __call__(self, x: Tensor) -> Tensor:
            """See `forward`."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        return self.down(ops.silu_mul(self.gate_up(x)))
