"""Context keys and values of all draft layers at once: how a draft network's memory of final tokens is made.

Letters: T tokens, L layers, Hkv key/value heads, S slots, D head size, P positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from paceline.ops.dispatch import implementation
from paceline.ops.reference.fused import wide

if TYPE_CHECKING:
    from torch import Tensor


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
    """Store every layer's keys, normed and rotated, and values: see `reference.context.context_write`."""
    kind = "cpu" if product.is_cpu else product.device.type
    op = implementation("context_write", kind, product.dtype)
    op(product, positions, cos_sin, slots, k_caches, v_caches, gains, eps)


def stacked(
    product: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    k_caches: Tensor,
    v_caches: Tensor,
    gains: Tensor,
    eps: float,
) -> None:
    """`context_write` with the norms and rotations of all layers together, and a write for each."""
    k, v = keys_values(product, positions, cos_sin, k_caches.shape[1], gains, eps)
    write = implementation("kv_write", "cpu" if k.is_cpu else k.device.type, k_caches.dtype)
    for layer in range(k_caches.shape[0]):
        write(k_caches[layer], v_caches[layer], slots, k[:, layer], v[:, layer])


def keys_values(
    product: Tensor, positions: Tensor, cos_sin: Tensor, heads: int, gains: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Keys, normed and rotated, and values [T, L, Hkv, D] of a product [T, L * 2 * Hkv * D].

    Args:
        product: of each layer keys, then values.
        positions: [T] int64 rows of `cos_sin`.
        cos_sin: [P, D].
        heads: Hkv.
        gains: [L, D] weights of the norms of keys.
        eps: of the norms.
    """
    (layers, dim), tokens = gains.shape, product.shape[0]
    both = product.view(tokens, layers, 2, heads, dim)
    k = both[:, :, 0].to(wide(both.dtype))  # [T, L, Hkv, D]
    k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + eps)
    k = (k * gains.to(k.dtype).unsqueeze(1)).to(both.dtype).view(tokens, layers * heads, dim)
    rope = implementation("rope", "cpu" if k.is_cpu else k.device.type, k.dtype)
    k, _ = cast("tuple[Tensor, Tensor]", rope(k, k[:, :0], positions, cos_sin))
    return k.view(tokens, layers, heads, dim), both[:, :, 1]
