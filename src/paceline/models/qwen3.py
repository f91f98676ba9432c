"""Qwen2 (biases on query, key and value) and Qwen3 (queries and keys normed per head), dense.

Yang et al., arXiv 2407.10671; Qwen Team, arXiv 2505.09388.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from paceline.models.base import DECODER_WEIGHTS, QK_NORM_WEIGHTS, CausalLM
from paceline.models.weights import WeightRule

if TYPE_CHECKING:
    from paceline.core.config import ModelConfig
    from paceline.models.hf import HFConfig

_QWEN3_HEAD_DIM = 128  # where a config.json gives none


class Qwen2(CausalLM):
    """Llama's block with biases on query, key and value."""

    WEIGHTS: ClassVar[tuple[WeightRule, ...]] = DECODER_WEIGHTS

    @classmethod
    def from_hf(cls, raw: HFConfig) -> ModelConfig:
        """The biases are part of the architecture: no key says so."""
        return raw.model_config(architecture="qwen2", qkv_bias=True)


class Qwen3(CausalLM):
    """Llama's block with a norm on each query and key head."""

    WEIGHTS: ClassVar[tuple[WeightRule, ...]] = (*DECODER_WEIGHTS, *QK_NORM_WEIGHTS)

    @classmethod
    def from_hf(cls, raw: HFConfig) -> ModelConfig:
        """A head has 128 elements unless the file says otherwise."""
        bias = raw.flag("attention_bias")
        return raw.model_config(
            architecture="qwen3",
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            head_dim=_QWEN3_HEAD_DIM,
        )
