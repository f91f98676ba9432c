"""All draft layers' context keys and values out of one product: the definition.

Letters: T tokens, L layers, Hkv key/value heads, S slots, D head size, P positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.ops.reference import fused

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
    """Store every layer's keys, normed and rotated, and values, in place; the same as layer by layer.

    Args:
        product: [T, L * 2 * Hkv * D]: of each layer keys, then values.
        positions: [T] int64 rows of `cos_sin`.
        cos_sin: [P, D] float32 or wider: D/2 cosines, then D/2 sines.
        slots: [T] int64, distinct; -1 writes nothing that anybody sees.
        k_caches: [L, Hkv, S, D]; the last slot is a dummy.
        v_caches: [L, Hkv, S, D].
        gains: [L, D] weights of the norms of keys.
        eps: of the norms.
    """
    layers, heads, _, dim = k_caches.shape
    both = product.view(product.shape[0], layers, 2, heads, dim)
    for layer in range(layers):
        k, v = both[:, layer].unbind(1)
        k = fused.rms_norm(k, gains[layer], eps)
        k, _ = fused.rope(k, k[:, :0], positions, cos_sin)
        fused.kv_write(k_caches[layer], v_caches[layer], slots, k, v)
