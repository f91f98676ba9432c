"""Pure functions on tensors, each dispatched on device and dtype to its fastest implementation.

The definition of every op is its plain-torch version in `ops.reference`. Nothing here owns state.

With PACELINE_LOG_OPS=1 each says what it is given before it runs (`ops.calls`).

Letters: T tokens, K/N input/output features, H hidden size, Hq/Hkv heads, D head size, P positions,
V vocabulary.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from paceline.ops import calls
from paceline.ops.dispatch import implementation
from paceline.ops.drafts import best_first, keyed_noise, learn, rank_candidates
from paceline.ops.packed import Groups, PackedWeight, pack, quantize
from paceline.ops.verify import (
    advance,
    compact,
    draft_inputs,
    judge,
    move_paths,
    pick_places,
    select,
    verify_inputs,
)

__all__ = [
    "Groups",
    "PackedWeight",
    "add_rms_norm",
    "advance",
    "best_first",
    "compact",
    "draft_inputs",
    "embedding",
    "judge",
    "keyed_noise",
    "kv_write",
    "learn",
    "linear",
    "linear_add_rms_norm",
    "linear_f32",
    "linear_swiglu",
    "move_paths",
    "pack",
    "pick_places",
    "quantize",
    "rank_candidates",
    "rms_norm",
    "rope",
    "rope_write",
    "select",
    "silu_mul",
    "verify_inputs",
]


def _type(x: Tensor) -> str:
    return "cpu" if x.is_cpu else x.device.type


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias: x [T, K], weight [N, K], bias [N] -> [T, N] in x's dtype."""
    if isinstance(weight, Tensor):
        return cast("Tensor", implementation("linear", _type(x), x.dtype)(x, weight, bias))
    if calls.ANNOUNCES:
        calls.announce("linear", "packed", x, weight, bias)
    return weight.matmul(x, bias)


def linear_f32(x: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """Return x @ weight.T, [T, N] float32 (or wider if x is): the head's logits.

    Float32 accumulators are kept where the implementation can.
    """
    if isinstance(weight, Tensor):
        return cast("Tensor", implementation("linear_f32", _type(x), x.dtype)(x, weight))
    if calls.ANNOUNCES:
        calls.announce("linear_f32", "packed", x, weight)
    return weight.matmul_f32(x)


def embedding(token_ids: Tensor, weight: Tensor | PackedWeight) -> Tensor:
    """Return the table's rows at token_ids: [T] int64, weight [V, H] -> [T, H]."""
    if isinstance(weight, Tensor):
        return cast(
            "Tensor", implementation("embedding", _type(weight), weight.dtype)(token_ids, weight)
        )
    if calls.ANNOUNCES:
        calls.announce("embedding", "table", token_ids, weight)
    return weight.rows(token_ids)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension: x [..., D], weight [D] -> x's dtype."""
    return cast("Tensor", implementation("rms_norm", _type(x), x.dtype)(x, weight, eps))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (normed, stream): stream = residual + x, rounded; normed = rms_norm(stream). [T, H]."""
    op = implementation("add_rms_norm", _type(x), x.dtype)
    return cast("tuple[Tensor, Tensor]", op(x, residual, weight, eps))


def linear_add_rms_norm(
    x: Tensor,
    weight: Tensor | PackedWeight,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of `linear`'s product: x [T, K], weight [N, K], residual [T, N] -> two [T, N].

    See `reference.linear.linear_add_rms_norm`; a bias [N] is the product's.
    """
    if not isinstance(weight, Tensor) or bias is not None:
        return add_rms_norm(linear(x, weight, bias), residual, norm_weight, eps)
    op = implementation("linear_add_rms_norm", _type(x), x.dtype)
    return cast("tuple[Tensor, Tensor]", op(x, weight, residual, norm_weight, eps))


def linear_swiglu(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`silu_mul` of `linear`'s product: x [T, K], weight [2I, K] (gate, then up), bias [2I] -> [T, I].

    See `reference.linear.linear_swiglu`; a bias is the product's.
    """
    if not isinstance(weight, Tensor) or bias is not None:
        return silu_mul(linear(x, weight, bias))
    return cast("Tensor", implementation("linear_swiglu", _type(x), x.dtype)(x, weight))


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] by `positions` [T] int64, halves paired.

    `cos_sin` is [P, D] float32 or wider: D/2 cosines, then D/2 sines.
    """
    op = implementation("rope", _type(q), q.dtype)
    return cast("tuple[Tensor, Tensor]", op(q, k, positions, cos_sin))


def rope_write(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Norm (if there are norms), rotate and store a projection [T, (Hq + 2 Hkv) D]; queries [T, Hq, D].

    See `reference.fused.rope_write`.
    """
    op = implementation("rope_write", _type(qkv), qkv.dtype)
    found = op(qkv, positions, cos_sin, slots, k_cache, v_cache, norms, eps)
    return cast("Tensor", found)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up: [T, 2I] (gate, then up) -> [T, I]."""
    return cast("Tensor", implementation("silu_mul", _type(gate_up), gate_up.dtype)(gate_up))


def kv_write(k_cache: Tensor, v_cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k, v [T, Hkv, D] at `slots` [T] of one layer's caches [Hkv, S, D]; -1 writes nothing."""
    op = implementation("kv_write", _type(k_cache), k_cache.dtype)
    op(k_cache, v_cache, slots, k, v)
