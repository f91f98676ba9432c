"""Attention: projections, optional q/k norm, rotary embedding, and `attend.heads` in the middle.

What happens between the keys and the output (cache, mask, kernel) is the caller's `Attend`: this
module is the same in serving, training and tests.

Letters: T tokens, H hidden size, Hq/Hkv query and key/value heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.core.batch import Attend, AttnSite
from paceline.layers.linear import Linear
from paceline.layers.norm import RMSNorm
from paceline.layers.rope import Rope

if TYPE_CHECKING:
    from paceline.core.config import ModelConfig


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., arXiv 2305.13245).

    Args:
        config: sizes, biases, and whether queries and keys are normed per head (Qwen3).
        index: the layer's index in its KV pool.
        dtype: of the parameters.
        device: where they live.
    """

    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    def __init__(
        self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.head_dim = dim
        self.site = AttnSite(index=index, scale=dim**-0.5)
        self.qkv = Linear(
            config.hidden_size,
            heads * dim,
            kv_heads * dim,
            kv_heads * dim,
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.out = Linear(
            heads * dim, config.hidden_size, bias=config.o_bias, dtype=dtype, device=device
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(dim, config.rms_norm_eps, dtype=dtype, device=device)

    if TYPE_CHECKING:  # nn.Module's own returns Any

        def __call__(self, x: Tensor, positions: Tensor, rope: Rope, attend: Attend) -> Tensor:
            """See `forward`."""

    def forward(self, x: Tensor, positions: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """[T, H] to [T, H].

        Args:
            x: [T, H], normed.
            positions: [T] int64.
            rope: the model's rotary embedding.
            attend: writes keys and values, and attends.
        """
        parts = torch.split(self.qkv(x), [*self.qkv.splits], dim=-1)
        q, k, v = (part.view(x.shape[0], -1, self.head_dim) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rope(q, k, positions)
        return self.out(attend.heads(self.site, q, k, v).flatten(1))
