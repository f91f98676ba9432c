"""Rotary position embedding: inverse frequencies of each kind, and the table made from them.

The table is float32 for every model dtype and made on the CPU, operation by operation as
`transformers` does it, so that positions far out rotate by the same rounded angles. It depends on
the configuration alone: the same on every device.

Letters: P positions, D head size, T tokens, Hq/Hkv heads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline import ops

if TYPE_CHECKING:
    from paceline.core.config import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int, max_position: int) -> tuple[Tensor, float]:
    """Inverse frequencies and the factor on cosines and sines.

    Args:
        rope: kind and parameters.
        head_dim: D, even.
        max_position: context length; stands in where `original_max_position` is None.

    Returns:
        [D/2] float32 and the attention factor (1.0 except for yarn).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    wavenumbers = rope.theta**exponents
    original = rope.original_max_position or max_position
    if rope.kind == "yarn":
        return _yarn(rope, wavenumbers, head_dim, original)
    inverse = 1.0 / wavenumbers
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "llama3":
        inverse = _llama3(rope, inverse, original)
    return inverse, 1.0


def _llama3(rope: RopeConfig, inverse: Tensor, original: int) -> Tensor:
    """Long waves are slowed by the factor, short ones kept, those between interpolated.

    As in Meta's reference code for Llama 3.1.
    """
    wavelengths = 2 * math.pi / inverse
    low, high = rope.low_freq_factor, rope.high_freq_factor
    longest, shortest = original / low, original / high
    scaled = torch.where(wavelengths > longest, inverse / rope.factor, inverse)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = ~(wavelengths < shortest) & ~(wavelengths > longest)
    return torch.where(between, blended, scaled)


def _yarn(
    rope: RopeConfig, wavenumbers: Tensor, head_dim: int, original: int
) -> tuple[Tensor, float]:
    """NTK-by-parts interpolation with an attention factor (Peng et al., arXiv 2309.00071, 3.2-3.4).

    Dimensions that turn more than `beta_fast` times within the original context are kept, those
    that turn less than `beta_slow` times are slowed by the factor, with a ramp between.
    """

    def dimension(rotations: float) -> float:
        turns = original / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp needs a width
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    kept, slowed = 1.0 / wavenumbers, 1.0 / (rope.factor * wavenumbers)
    return slowed * (1 - keep) + kept * keep, _yarn_attention(rope)


def _yarn_attention(rope: RopeConfig) -> float:
    """The factor that a checkpoint gives, or the paper's (eq. 22) from its scaling factor."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def cos_sin_table(rope: RopeConfig, head_dim: int, max_position: int) -> Tensor:
    """The table that `ops.rope` reads: [P, D] float32, D/2 cosines, then D/2 sines.

    Args:
        rope: kind and parameters.
        head_dim: D, even.
        max_position: P.
    """
    inverse, factor = frequencies(rope, head_dim, max_position)
    angles = torch.arange(max_position).float().unsqueeze(1) * inverse
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=1)


class Rope(nn.Module):
    """Rotates queries and keys by their positions; one instance serves all layers of a model.

    The table is made on the CPU; move the module to put it elsewhere. It is not saved.

    Args:
        rope: kind and parameters.
        head_dim: D, even.
        max_position: P; positions must stay below it.
    """

    cos_sin: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int) -> None:
        super().__init__()
        table = cos_sin_table(rope, head_dim, max_position)
        self.register_buffer("cos_sin", table, persistent=False)

    if TYPE_CHECKING:  # nn.Module's own returns Any

        def __call__(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            """See `forward`."""

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated (q [T, Hq, D], k [T, Hkv, D]) for positions [T] int64."""
        return ops.rope(q, k, positions, self.cos_sin)
