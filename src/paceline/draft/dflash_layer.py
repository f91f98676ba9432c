"""One layer of DFlash's network.

Letters: T tokens, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.core.batch import Attend, AttnSite
from paceline.draft.dflash2 import GroupedConv
from paceline.draft.dflash_config import DFlashConfig
from paceline.layers.attention import Attention
from paceline.layers.mlp import MLP
from paceline.layers.norm import RMSNorm
from paceline.layers.rope import Rope


class DFlashLayer(nn.Module):
    """A pre-norm block of the draft: attention with q/k norm, gated MLP; DFlash 2's convolutions.

    Args:
        config: of the network.
        index: the layer's index in the draft pool.
        dtype: of the parameters.
        device: where they live.
    """

    attention_conv: GroupedConv | None
    mlp_conv: GroupedConv | None

    def __init__(
        self, config: DFlashConfig, index: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        size, eps, layer = config.hidden_size, config.rms_norm_eps, config.layer_config()
        self.attention_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.attention = Attention(layer, index, dtype=dtype, device=device)
        self.attention.site = AttnSite(
            index=index,
            scale=config.head_dim**-0.5,
            window=config.windows[index],
            tail="causal" if config.causal[index] else "mask",
        )
        self.mlp_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = MLP(layer, dtype=dtype, device=device)
        self.attention_conv = self.mlp_conv = None
        if config.conv is not None:
            block = config.block_size
            self.attention_conv = GroupedConv(config.conv, size, block, dtype=dtype, device=device)
            self.mlp_conv = GroupedConv(config.conv, size, block, dtype=dtype, device=device)

    if TYPE_CHECKING:  # nn.Module's own returns Any

        def __call__(
            self, x: Tensor, residual: Tensor | None, positions: Tensor, rope: Rope, attend: Attend
        ) -> tuple[Tensor, Tensor]:
            """See `forward`."""

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, rope: Rope, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Return (what the MLP adds [T, H], the stream before it [T, H]).

        Args:
            x: [T, H], what the last layer adds, or the embeddings.
            residual: [T, H], the stream before it; None in the first layer.
            positions: [T] int64.
            rope: the network's rotary embedding.
            attend: attention as an argument.
        """
        if residual is None:
            x, residual = self.attention_norm(x), x
        else:
            x, residual = self.attention_norm.add(x, residual)
        if self.attention_conv is None or self.mlp_conv is None:
            x = self.attention(x, positions, rope, attend)
            x, residual = self.mlp_norm.add(x, residual)
            return self.mlp(x), residual
        mixed = self.attention_conv.before(x)
        x = self.attention_conv.after(self.attention(mixed.rows, positions, rope, attend), mixed)
        x, residual = self.mlp_norm.add(x, residual)
        mixed = self.mlp_conv.before(x)
        return self.mlp_conv.after(self.mlp(mixed.rows), mixed), residual
