"""Llama 2 and 3, and what has its shape: SmolLM2, Mistral without sliding window.

Touvron et al., arXiv 2307.09288; Llama Team, arXiv 2407.21783.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from paceline.models.base import DECODER_WEIGHTS, CausalLM
from paceline.models.weights import WeightRule

if TYPE_CHECKING:
    from paceline.core.config import ModelConfig
    from paceline.models.hf import HFConfig


class Llama(CausalLM):
    """Pre-norm decoder; biases only where a configuration asks for them."""

    WEIGHTS: ClassVar[tuple[WeightRule, ...]] = DECODER_WEIGHTS

    @classmethod
    def from_hf(cls, raw: HFConfig) -> ModelConfig:
        """`attention_bias` is on all four attention projections, `mlp_bias` on all three others."""
        bias = raw.flag("attention_bias")
        return raw.model_config(
            architecture="llama", qkv_bias=bias, o_bias=bias, mlp_bias=raw.flag("mlp_bias")
        )
