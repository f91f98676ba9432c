"""A pass of a network as calls of `ops`, with all work between two products in one: for a GPU.

The arithmetic of the network's modules in fewer calls; a layer is

    product   rope_write   attention   product and add_rms_norm   product and silu_mul   product and add_rms_norm

where the modules call norms of heads, rope and cache write one by one. A layer ends with the norm that
the next one begins with; its output, which may be tapped, is the stream that this norm stores anyway.
Nothing is read back and all shapes are the batch's, so that a pass can be captured. Wherever the ops run,
so does the pass: a CPU is for tests.

Letters: T tokens, H hidden size, I intermediate size, Hq/Hkv heads, D head size, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline import ops
from paceline.attention.base import PagedAttend
from paceline.core.batch import ForwardOutput
from paceline.core.meanwhile import Meanwhile, nothing
from paceline.engine.fused_pass import FusedPass

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.attention.base import AttentionBackend
    from paceline.core.batch import AttnSite, ForwardBatch
    from paceline.kv.pool import KVPool
    from paceline.layers.decoder import Decoder, PreNormLayer
    from paceline.layers.linear import Linear
    from paceline.ops.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix [N, K] and its bias [N]; multiplied by what is fastest for the number of rows."""

    weight: Tensor | PackedWeight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        return ops.linear(x, self.weight, self.bias)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Of the product [T, N] and the stream so far: the norm, and the stream with the product."""
        return ops.linear_add_rms_norm(x, self.weight, residual, norm_weight, eps, self.bias)

    def swiglu(self, x: Tensor) -> Tensor:
        """Of the product [T, 2I], gate and then up: silu(gate) * up, [T, I]."""
        return ops.linear_swiglu(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A pre-norm layer's parts, looked up once: a module finds its parameters by name at each call."""

    site: AttnSite
    k_cache: Tensor  # [Hkv, S, D]
    v_cache: Tensor  # [Hkv, S, D]
    qkv: Product
    head_norms: tuple[Tensor, Tensor] | None  # [D] of queries, [D] of keys
    out: Product
    mlp_norm: Tensor  # [H]
    gate_up: Product
    down: Product
    next_norm: Tensor  # [H], the next layer's first, or the network's last


class OpsPass(FusedPass):
    """Each layer as six operators.

    Args:
        net: the network's parts. Parameters may change in place, but not be exchanged.
        pool: where keys and values go.
        backend: attention over the pool.
        product: how matrices are multiplied.
    """

    one_call = False

    def __init__(
        self,
        net: Decoder,
        pool: KVPool,
        backend: AttentionBackend,
        product: type[Product] = Product,
    ) -> None:
        self._net = net
        self._pool = pool
        self._backend = backend
        norms = [layer.attention_norm.weight for layer in net.layers]
        self._first_norm = norms[0]
        following = zip(net.layers, [*norms[1:], net.norm.weight], strict=True)
        self._layers = [_layer(layer, norm, pool, product) for layer, norm in following]

    def forward(
        self, batch: ForwardBatch, aux_layers: tuple[int, ...], meanwhile: Meanwhile = nothing
    ) -> ForwardOutput:
        """See `FusedPass`."""
        meanwhile()
        net, eps = self._net, self._net.eps
        self._backend.plan(batch)
        attend = PagedAttend(self._backend, self._pool, batch)
        stream = net.embed(batch.token_ids)
        normed = ops.rms_norm(stream, self._first_norm, eps)
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            q = ops.rope_write(
                layer.qkv(normed),
                batch.positions,
                net.cos_sin,
                batch.slots,
                layer.k_cache,
                layer.v_cache,
                layer.head_norms,
                eps,
            )
            x = attend.written(layer.site, q).flatten(1)
            normed, stream = layer.out.add_rms_norm(x, stream, layer.mlp_norm, eps)
            x = layer.gate_up.swiglu(normed)
            normed, stream = layer.down.add_rms_norm(x, stream, layer.next_norm, eps)
            if index in aux_layers:
                taps[index] = stream
        aux = torch.cat([taps[index] for index in aux_layers], dim=-1) if aux_layers else None
        return ForwardOutput(hidden=normed, aux=aux)


def _layer(layer: PreNormLayer, next_norm: Tensor, pool: KVPool, kind: type[Product]) -> _Layer:
    attention, mlp = layer.attention, layer.mlp

    def product(linear: Linear) -> Product:
        return kind(linear.weight, linear.bias)

    head_norms = None
    if attention.q_norm is not None and attention.k_norm is not None:
        head_norms = (attention.q_norm.weight, attention.k_norm.weight)
    return _Layer(
        site=attention.site,
        k_cache=pool.k[attention.site.index],
        v_cache=pool.v[attention.site.index],
        qkv=product(attention.qkv),
        head_norms=head_norms,
        out=product(attention.out),
        mlp_norm=layer.mlp_norm.weight,
        gate_up=product(mlp.gate_up),
        down=product(mlp.down),
        next_norm=next_norm,
    )
