"""How a drafter network is kept on a CPU: its matrices, and its copy of the target's head.

A drafter's guesses decide nothing, so they may come of rounded weights. At one sequence a draft step
is mostly the reading of them, and of the head most of all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from paceline import ops
from paceline.core.errors import ConfigError
from paceline.ops.cpu import groups

if TYPE_CHECKING:
    from paceline.models.base import CausalLM


def draft_weights(
    asked: Literal["auto", "8bit", "bf16"], device: torch.device, dtype: torch.dtype
) -> Literal["8bit", "bf16"]:
    """Resolve "auto": 8 bits on a CPU with an own kernel for them and 16-bit activations.

    Raises:
        ConfigError: 8 bits are asked for where there is no kernel for them.
    """
    reason = groups.refusal(dtype) if device.type == "cpu" else f"the device is {device.type}"
    if asked == "8bit" and reason is not None:
        msg = (
            f"a drafter in 8 bits was asked for, and {reason}; 'bf16' is possible everywhere: leave "
            "spec_weights (--spec-weights) out"
        )
        raise ConfigError(msg)
    if asked == "auto":
        return "8bit" if reason is None and dtype.itemsize == 2 else "bf16"
    return asked


def light_head(net: CausalLM, dtype: torch.dtype) -> tuple[Callable[[Tensor], Tensor], int]:
    """Return a head of 8 bits, [M, H] to [M, V] float32, and the bytes that it takes besides.

    It is the target's own where that is packed and so as small, or no kernel takes its shape.

    Args:
        net: the target.
        dtype: of activations.
    """
    matrix = net.embed if net.lm_head is None else net.lm_head
    weight = matrix.weight
    plain = weight if isinstance(weight, Tensor) else weight.plain()
    packed = None if plain is None else ops.pack(plain, "8bit", dtype)
    if packed is None or isinstance(packed, Tensor):
        return net.head, 0
    return partial(ops.linear_f32, weight=packed), packed.nbytes
