"""Eagle3Config: shape and layout of an EAGLE-3 drafter (Li et al., arXiv 2503.01840).

What a file's keys mean is `eagle3_layouts.py`'s business; this is what they mean once resolved.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.config import ModelConfig, RopeConfig
from paceline.draft.base import DraftKV

NUM_TAPS = 3  # low, middle, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """Shape and layout of an EAGLE-3 network; everything that a checkpoint may choose, resolved.

    The flags say where the layouts differ in what they compute (`eagle3_net.py` has the formulas).
    `norm_before_fc` and `fc_norm` exclude each other.
    """

    hidden_size: int  # H
    target_hidden_size: int  # Ht
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # V, the target's
    draft_vocab_size: int  # Vd <= V
    # Taps: the OUTPUTS of these target layers (the residual stream after them), counted from 0.
    aux_layers: tuple[int, int, int]
    max_position: int  # the length that it was made for; the target's may be longer
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # queries and keys are normed per head (drafts in Qwen3's form)
    norm_before_fc: bool = False  # one norm over all three taps together, before `fc`
    fc_norm: bool = False  # a norm for each tap, before `fc`
    norm_before_residual: bool = False  # the residual stream starts from the normed feature
    norm_output: bool = False  # what is fed back has passed the final norm
    own_embedding: bool = False  # [V, H] of its own; else the target's, and H is Ht
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        assert not (self.norm_before_fc and self.fc_norm), "one norm before `fc` at most"
        assert len(self.aux_layers) == NUM_TAPS, "low, middle and high"
        assert self.own_embedding or self.hidden_size == self.target_hidden_size, (
            "the target's embedding has the target's width"
        )

    @property
    def num_layers(self) -> int:
        """One; others are refused."""
        return 1

    @property
    def kv(self) -> DraftKV:
        """What the network caches per token."""
        return DraftKV(num_layers=1, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    def layer_config(self) -> ModelConfig:
        """The draft layer, in the words of `paceline.layers`, but for its doubled input."""
        return ModelConfig(
            architecture="llama",
            vocab_size=self.draft_vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position=self.max_position,
            rms_norm_eps=self.rms_norm_eps,
            rope=self.rope,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            qk_norm=self.qk_norm,
        )


def default_taps(num_target_layers: int) -> tuple[int, int, int]:
    """The outputs that are tapped where a file names no layers: 1, L // 2 - 1, L - 4.

    SafeAILab counts inputs, (2, L // 2, L - 3): the same streams.
    """
    return 1, num_target_layers // 2 - 1, num_target_layers - 4
