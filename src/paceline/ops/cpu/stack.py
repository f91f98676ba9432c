"""All layers of a decoder as one call of an own kernel, bit by bit what the separate calls give.

A pass of one token through a 135 M model is 300 operator calls; what lies between them in Python
takes longer than the arithmetic of a 4-bit model. This is the CPU's counterpart of a graph launch.

Letters: T tokens, H hidden size, I intermediate size, Hq/Hkv heads, D head size, P positions,
L layers, S slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.meanwhile import Meanwhile, nothing
from paceline.ops import calls
from paceline.ops.cpu.dense import DenseWeight
from paceline.ops.cpu.groups import GroupWeight
from paceline.ops.cpu.native import DTYPES, Native, refusal
from paceline.ops.cpu.threads import kernel_threads

if TYPE_CHECKING:
    from paceline.ops.cpu.attention import Planned
    from paceline.ops.packed import PackedWeight

_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class _Matrix(ctypes.Structure):
    """`Matrix` in stack.c."""

    _fields_ = (
        *((name, _P) for name in ("data", "scales", "mins", "bias")),
        *((name, _L) for name in ("k", "n")),
        *((name, _I) for name in ("is_groups", "w_dtype", "pairs", "bits", "zero", "s_dtype")),
        ("b_dtype", _I),
        ("pad", _I),
    )


class _Layer(ctypes.Structure):
    """`Layer` in stack.c."""

    _fields_ = (
        *((name, _P) for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, _Matrix) for name in ("qkv", "out", "gate_up", "down")),
        ("scale", ctypes.c_float),
        ("pad", _I),
        ("window", _L),
    )


class _Stack(ctypes.Structure):
    """`Stack` in stack.c."""

    _fields_ = (
        *((name, _P) for name in ("layers", "norm", "cos_sin", "k_pool", "v_pool")),
        *((name, _L) for name in ("count", "hidden", "q_heads", "kv_heads", "width", "inner")),
        *((name, _L) for name in ("pool_layer", "pool_head")),
        ("eps", ctypes.c_float),
        ("dtype", _I),
        ("n_dtype", _I),
    )


class _Pass(ctypes.Structure):
    """`Pass` in stack.c."""

    _fields_ = (
        *((name, _P) for name in ("x", "slots", "hidden", "taps", "tapped")),
        ("num_taps", _L),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix and its bias."""

    weight: Tensor | PackedWeight  # [N, K]
    bias: Tensor | None  # [N]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """A pre-norm block: attention, then a gated MLP."""

    attention_norm: Tensor  # [H]
    qkv: Product  # [(Hq + 2 Hkv) D, H]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    out: Product  # [H, Hq D]
    mlp_norm: Tensor  # [H]
    gate_up: Product  # [2I, H]
    down: Product  # [H, I]
    scale: float  # of the scores
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StackWeights:
    """A decoder without its embedding and head."""

    layers: Sequence[LayerWeights]
    norm: Tensor  # [H]
    cos_sin: Tensor  # [P, D] float32
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of activations


def refuses(weights: StackWeights, k_cache: Tensor) -> str | None:
    """Why the layers can't run in one call over this pool ([L, Hkv, S, D]), as a clause."""
    reason = refusal(weights.dtype)
    if reason is not None:
        return reason
    if k_cache.dtype != weights.dtype:
        return f"the pool holds {str(k_cache.dtype)[6:]}, the network {str(weights.dtype)[6:]}"
    if weights.head_dim % 16:
        return f"heads of {weights.head_dim} are no multiple of 16"
    if weights.cos_sin.dtype != torch.float32 or not weights.cos_sin.is_contiguous():
        return "the rotary table is not float32"
    norms = [weights.norm]
    for layer in weights.layers:
        norms += [
            n
            for n in (layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm)
            if n is not None
        ]
        for product in (layer.qkv, layer.out, layer.gate_up, layer.down):
            reason = _unfit(product, weights.dtype)
            if reason is not None:
                return reason
    if {norm.dtype for norm in norms} != {weights.norm.dtype} or weights.norm.dtype not in DTYPES:
        return "the norms are of different dtypes"
    return None


def _unfit(product: Product, dtype: torch.dtype) -> str | None:
    weight, bias = product.weight, product.bias
    if not isinstance(weight, DenseWeight | GroupWeight):
        return "a matrix is not packed for own kernels"
    if isinstance(weight, DenseWeight) and weight.dtype != dtype:
        return "a matrix is of another dtype than the activations"
    if bias is not None and (bias.dtype not in DTYPES or not bias.is_contiguous()):
        return "a bias is not plain"
    return None


def _matrix(product: Product) -> _Matrix:
    weight, bias = product.weight, product.bias
    found = _Matrix(
        k=weight.shape[1],
        n=weight.shape[0],
        bias=None if bias is None else bias.data_ptr(),
        b_dtype=0 if bias is None else DTYPES[bias.dtype],
    )
    if isinstance(weight, GroupWeight):
        found.data, found.scales, found.mins = weight.addresses
        found.is_groups, found.bits, found.zero = 1, weight.bits, weight.zero
        found.s_dtype = DTYPES[weight.scales.dtype]
    else:
        assert isinstance(weight, DenseWeight), "refuses() was not asked"
        found.data, found.pairs = weight.address, weight.way
        found.w_dtype = DTYPES[weight.dtype]
    return found


class Stack:
    """A decoder's layers over a pool, ready to run.

    Args:
        weights: what `refuses` did not refuse; kept, as only its addresses are copied.
        k_cache: [L, Hkv, S, D] of the pool.
        v_cache: [L, Hkv, S, D].
        lib: the kernels.
    """

    def __init__(
        self, weights: StackWeights, k_cache: Tensor, v_cache: Tensor, lib: Native
    ) -> None:
        self._kept = (weights, k_cache, v_cache)
        self._lib = lib
        self._hidden = weights.norm.shape[0]
        self._dtype = weights.dtype
        self.num_heads = weights.num_heads
        self._layers = (_Layer * len(weights.layers))(*map(_layer, weights.layers))
        self._struct = _Stack(
            layers=ctypes.addressof(self._layers),
            norm=weights.norm.data_ptr(),
            cos_sin=weights.cos_sin.data_ptr(),
            k_pool=k_cache.data_ptr(),
            v_pool=v_cache.data_ptr(),
            count=len(weights.layers),
            hidden=self._hidden,
            q_heads=weights.num_heads,
            kv_heads=weights.num_kv_heads,
            width=weights.head_dim,
            inner=weights.layers[0].down.weight.shape[1],
            pool_layer=k_cache.stride(0),
            pool_head=k_cache.stride(1),
            eps=weights.eps,
            dtype=DTYPES[weights.dtype],
            n_dtype=DTYPES[weights.norm.dtype],
        )

    def run(
        self,
        plan: Planned,
        x: Tensor,
        slots: Tensor,
        tapped: tuple[int, ...] = (),
        meanwhile: Meanwhile = nothing,
    ) -> tuple[Tensor, Tensor | None]:
        """Run all layers and the last norm; keys and values are written to the pool.

        Args:
            plan: the pass, for queries of the stack's dtype.
            x: [T, H] embeddings.
            slots: [T] int64; -1 writes nothing.
            tapped: layers whose output stream is wanted, each once.
            meanwhile: see `core.meanwhile`.

        Returns:
            hidden [T, H], and the streams [T, n * H] in `tapped`'s order, or None.
        """
        assert x.dtype == self._dtype, "embeddings must be of the stack's dtype"
        x, slots = x.contiguous(), slots.contiguous()
        hidden = torch.empty_like(x)
        taps = x.new_empty(x.shape[0], len(tapped) * self._hidden) if tapped else None
        layers = (ctypes.c_int64 * len(tapped))(*tapped)
        this = _Pass(
            x=x.data_ptr(),
            slots=slots.data_ptr(),
            hidden=hidden.data_ptr(),
            taps=None if taps is None else taps.data_ptr(),
            tapped=ctypes.addressof(layers),
            num_taps=len(tapped),
        )
        if calls.ANNOUNCES:
            calls.announce("stack", "own", x, slots, *plan.tensors, tapped)
        meanwhile()
        self._lib.stack(
            ctypes.addressof(self._struct),
            plan.address,
            ctypes.addressof(this),
            kernel_threads(),
        )
        return hidden, taps


def _layer(layer: LayerWeights) -> _Layer:
    return _Layer(
        attention_norm=layer.attention_norm.data_ptr(),
        q_norm=None if layer.q_norm is None else layer.q_norm.data_ptr(),
        k_norm=None if layer.k_norm is None else layer.k_norm.data_ptr(),
        mlp_norm=layer.mlp_norm.data_ptr(),
        qkv=_matrix(layer.qkv),
        out=_matrix(layer.out),
        gate_up=_matrix(layer.gate_up),
        down=_matrix(layer.down),
        scale=layer.scale,
        window=layer.window or 0,
    )
