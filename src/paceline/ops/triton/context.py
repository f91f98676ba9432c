"""A draft network's context keys and values on a GPU: norm, rotation and cache write of all layers, one kernel.

A program has up to eight heads of one layer of one token; one without a slot reads nothing. Arithmetic is
in float32, rounded after the norm and after the rotation, as the definition does.

Letters: T tokens, L layers, Hkv key/value heads, S slots, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.ops import context as composed
from paceline.ops.triton.context_kernels import context_kernel
from paceline.ops.triton.refusal import DTYPES
from paceline.ops.triton.sizes import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

_HEADS = 8  # of a program


def context_write(
    product: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    k_caches: Tensor,
    v_caches: Tensor,
    gains: Tensor,
    eps: float,
) -> None:
    """See `ops.reference.context.context_write`."""
    layers, heads, _, dim = k_caches.shape
    alike = k_caches.stride() == v_caches.stride() and k_caches.stride(3) == 1
    angles = cos_sin.dtype == torch.float32 and cos_sin.stride(1) == 1 and dim % 2 == 0
    plain = product.stride(1) == 1 and gains.stride(1) == 1 and k_caches.dtype in DTYPES
    if not (alike and angles and plain):
        composed.stacked(product, positions, cos_sin, slots, k_caches, v_caches, gains, eps)
        return
    if not product.shape[0]:
        return
    with torch.cuda.device_of(product):  # type: ignore[no-untyped-call]
        context_kernel[(product.shape[0], layers * -(-heads // _HEADS))](
            product,
            k_caches,
            v_caches,
            gains,
            positions.contiguous(),
            cos_sin,
            slots.contiguous(),
            eps,
            product.stride(0),
            k_caches.stride(0),
            k_caches.stride(1),
            k_caches.stride(2),
            gains.stride(0),
            cos_sin.stride(0),
            HEADS=heads,
            DIM=dim,
            HALF=power_of_two(dim // 2),
            BLOCK_H=_HEADS,
            num_warps=4,
        )
