"""What every kind of drafter in training needs of its target: facts, plain head, chosen operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.draft.base import TargetInfo
from paceline.ops.dispatch import implementation

if TYPE_CHECKING:
    from paceline.core.config import ModelConfig
    from paceline.models.base import CausalLM

_OPS = ("linear", "rms_norm", "add_rms_norm", "rope", "silu_mul")  # what targets and drafters call


def target_info(target: CausalLM) -> TargetInfo:
    """What a draft network may use of its target."""
    return TargetInfo(
        config=target.config,
        device=target.device,
        dtype=target.dtype,
        embed=target.embed,
        head=target.head,
    )


def check_taps(taps: Sequence[int], target: ModelConfig) -> None:
    """Refuse layers that the target does not have.

    Raises:
        ConfigError: as above.
    """
    wrong = [tap for tap in taps if not 0 <= tap < target.num_layers]
    if wrong:
        msg = (
            f"tapped layers {wrong} do not exist; the target has layers 0 to "
            f"{target.num_layers - 1}; change --taps"
        )
        raise ConfigError(msg)


def head_matrix(target: CausalLM) -> Tensor:
    """The target's head [V, H], plain and without gradients; a tied one is the embedding."""
    head = target.embed.weight if target.lm_head is None else target.lm_head.weight
    if not isinstance(head, Tensor):  # packed for this CPU: a loss wants it as it is
        head = head.rows(torch.arange(target.config.vocab_size))
    return head.detach()


def choose_ops(target: CausalLM) -> None:
    """Choose the networks' operators now, since torch.compile follows no imports."""
    for op in _OPS:
        implementation(op, target.device.type, target.dtype)
