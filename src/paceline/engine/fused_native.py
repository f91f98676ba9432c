"""A pass of a network as one native call, where every part of it is an own CPU kernel.

The same kernels in the same order as the network's modules call, without the modules: about 3 ms of
Python less a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.batch import ForwardOutput
from paceline.core.meanwhile import Meanwhile, nothing
from paceline.engine.fused_pass import FusedPass
from paceline.ops.cpu import attention as kernel
from paceline.ops.cpu import stack
from paceline.ops.cpu.native import native

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paceline.core.batch import ForwardBatch
    from paceline.kv.pool import KVPool
    from paceline.layers.decoder import Decoder, PreNormLayer
    from paceline.layers.linear import Linear


class NativePass(FusedPass):
    """Own CPU kernels, called by one of them.

    Args:
        embed: ids [T] int64 to [T, H].
        pool: where keys and values go.
        layers: the rest of the network.
    """

    one_call = True

    def __init__(
        self, embed: Callable[[Tensor], Tensor], pool: KVPool, layers: stack.Stack
    ) -> None:
        self._embed = embed
        self._pool = pool
        self._layers = layers

    def forward(
        self, batch: ForwardBatch, aux_layers: tuple[int, ...], meanwhile: Meanwhile = nothing
    ) -> ForwardOutput:
        """See `FusedPass`."""
        x = self._embed(batch.token_ids)
        plan = kernel.plan(
            num_rows=batch.num_rows,
            positions=batch.positions,
            prefix_lens=batch.prefix_lens,
            cu_q=batch.cu_q,
            tail_lens=batch.tail_lens,
            mask=batch.mask,
            pages=batch.pages,
            page_size=self._pool.page_size,
            q_heads=self._layers.num_heads,
            q_dtype=x.dtype,
            k_cache=self._pool.k[0],
        )
        hidden, aux = self._layers.run(plan, x, batch.slots, aux_layers, meanwhile)
        return ForwardOutput(hidden=hidden, aux=aux)


def native_pass(net: Decoder, pool: KVPool) -> NativePass | str:
    """Return the pass of a network over a pool whose attention is an own kernel, or why there is none.

    Args:
        net: the network's parts.
        pool: its pool.
    """
    layers = net.layers
    if any(layer.attention.site.tail != "mask" for layer in layers):
        return "a layer has a tail rule of its own"
    if [layer.attention.site.index for layer in layers] != list(range(pool.num_layers)):
        return "layers and pool don't match one to one"
    weights = stack.StackWeights(
        layers=[_layer(layer) for layer in layers],
        norm=net.norm.weight,
        cos_sin=net.cos_sin,
        eps=net.eps,
        num_heads=net.num_heads,
        num_kv_heads=net.num_kv_heads,
        head_dim=net.head_dim,
        dtype=net.dtype,
    )
    reason = stack.refuses(weights, pool.k)
    lib = native()
    if reason is not None or lib is None:
        return reason or "there are no own kernels here"
    return NativePass(net.embed, pool, stack.Stack(weights, pool.k, pool.v, lib))


def _layer(layer: PreNormLayer) -> stack.LayerWeights:
    attention, mlp = layer.attention, layer.mlp

    def product(linear: Linear) -> stack.Product:
        return stack.Product(weight=linear.weight, bias=linear.bias)

    def norm_of(module: object) -> Tensor | None:
        return getattr(module, "weight", None)

    return stack.LayerWeights(
        attention_norm=layer.attention_norm.weight,
        qkv=product(attention.qkv),
        q_norm=norm_of(attention.q_norm),
        k_norm=norm_of(attention.k_norm),
        out=product(attention.out),
        mlp_norm=layer.mlp_norm.weight,
        gate_up=product(mlp.gate_up),
        down=product(mlp.down),
        scale=attention.site.scale,
        window=attention.site.window,
    )
