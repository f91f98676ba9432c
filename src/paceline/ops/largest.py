"""The largest of many numbers in two stages, for few of them: maxima of blocks, then the best blocks.

Letters: B rows, P positions, V vocabulary, C count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from paceline.ops.dispatch import implementation
from paceline.ops.reference import candidates as reference
from paceline.ops.reference.peaks import BLOCK

if TYPE_CHECKING:
    from torch import Tensor


def largest(
    logits: Tensor, temperature: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.candidates.largest`. The `count` largest lie in the blocks with the largest maxima."""
    blocks = logits.shape[-1] // BLOCK
    # A CPU sorts blocks too slowly.
    few = blocks >= 4 * count and (count <= BLOCK or not logits.is_cpu)
    if not few or logits.shape[-1] % BLOCK:
        return reference.largest(logits, temperature, count)
    y = logits
    if temperature is not None:
        y = logits / reference.heat(temperature, logits.dtype).view(-1, 1, 1)
    peaks = implementation("peaks", "cpu" if y.is_cpu else y.device.type, y.dtype)
    maxima, mass = cast("tuple[Tensor, Tensor]", peaks(y))
    cut = y.view(*y.shape[:-1], blocks, BLOCK)
    chosen = maxima.topk(count, dim=-1).indices
    kept = cut.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, BLOCK)).flatten(-2)
    top, place = kept.topk(count, dim=-1)
    block = chosen.gather(-1, place.div(BLOCK, rounding_mode="floor"))
    return top, block * BLOCK + place % BLOCK, mass
