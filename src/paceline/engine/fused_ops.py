"""A pass of a network as calls of `ops`, with all work between two products in one: for a GPU.

The arithmetic of the network's modules in fewer calls; a layer is

    add_rms_norm   product   rope_write   attention   product   add_rms_norm   product   silu_mul   product

where the modules call norms of heads, rope and cache write one by one. A layer's output, which may be
tapped, is the stream that the next norm stores anyway. Nothing is read back and all shapes are the
batch's, so that a pass can be captured. Wherever the ops run, so does the pass: a CPU is for tests.

Letters: T tokens, H hidden size, I intermediate size, Hq/Hkv heads, D head size, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline import ops
from paceline.attention.base import PagedAttend
from paceline.core.batch import ForwardOutput
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
class _Product:
    """A matrix [N, K] and its bias [N]."""

    weight: Tensor | PackedWeight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        return ops.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A pre-norm layer's parts, looked up once: a module finds its parameters by name at each call."""

    site: AttnSite
    k_cache: Tensor  # [Hkv, S, D]
    v_cache: Tensor  # [Hkv, S, D]
    attention_norm: Tensor  # [H]
    qkv: _Product
    head_norms: tuple[Tensor, Tensor] | None  # [D] of queries, [D] of keys
    out: _Product
    mlp_norm: Tensor  # [H]
    gate_up: _Product
    down: _Product


class OpsPass(FusedPass):
    """Each layer as nine operators.

    Args:
        net: the network's parts. Parameters may change in place, but not be exchanged.
        pool: where keys and values go.
        backend: attention over the pool.
    """

    one_call = False

    def __init__(self, net: Decoder, pool: KVPool, backend: AttentionBackend) -> None:
        self._net = net
        self._pool = pool
        self._backend = backend
        self._norm = net.norm.weight
        self._layers = [_layer(layer, pool) for layer in net.layers]

    def forward(self, batch: ForwardBatch, aux_layers: tuple[int, ...]) -> ForwardOutput:
        """See `FusedPass`."""
        net, eps = self._net, self._net.eps
        self._backend.plan(batch)
        attend = PagedAttend(self._backend, self._pool, batch)
        x, stream = net.embed(batch.token_ids), None
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            if stream is None:
                normed, stream = ops.rms_norm(x, layer.attention_norm, eps), x
            else:
                normed, stream = ops.add_rms_norm(x, stream, layer.attention_norm, eps)
                if index - 1 in aux_layers:
                    taps[index - 1] = stream
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
            x = layer.out(attend.written(layer.site, q).flatten(1))
            normed, stream = ops.add_rms_norm(x, stream, layer.mlp_norm, eps)
            x = layer.down(ops.silu_mul(layer.gate_up(normed)))
        assert stream is not None, "a network has layers"
        hidden, stream = ops.add_rms_norm(x, stream, self._norm, eps)
        taps[len(self._layers) - 1] = stream
        aux = torch.cat([taps[index] for index in aux_layers], dim=-1) if aux_layers else None
        return ForwardOutput(hidden=hidden, aux=aux)


def _layer(layer: PreNormLayer, pool: KVPool) -> _Layer:
    attention, mlp = layer.attention, layer.mlp

    def product(linear: Linear) -> _Product:
        return _Product(linear.weight, linear.bias)

    head_norms = None
    if attention.q_norm is not None and attention.k_norm is not None:
        head_norms = (attention.q_norm.weight, attention.k_norm.weight)
    return _Layer(
        site=attention.site,
        k_cache=pool.k[attention.site.index],
        v_cache=pool.v[attention.site.index],
        attention_norm=layer.attention_norm.weight,
        qkv=product(attention.qkv),
        head_norms=head_norms,
        out=product(attention.out),
        mlp_norm=layer.mlp_norm.weight,
        gate_up=product(mlp.gate_up),
        down=product(mlp.down),
    )
