"""A network's pre-norm layers laid open, for who runs them in one call instead of module by module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.layers.attention import Attention
    from paceline.layers.mlp import MLP
    from paceline.layers.norm import RMSNorm


class PreNormLayer(Protocol):
    """x += attention(attention_norm(x)); x += mlp(mlp_norm(x)); and nothing else."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """What a network is made of if its pass is: embed, pre-norm layers in their order, final norm."""

    embed: Callable[[Tensor], Tensor]  # ids [T] int64 -> [T, H]
    layers: Sequence[PreNormLayer]
    norm: RMSNorm
    cos_sin: Tensor  # [P, D] float32: the rotary table
    eps: float  # of all norms
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of activations
