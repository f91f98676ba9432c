"""Which fused pass a network's layers get: one native call on a CPU, fewer operators on a GPU, or none.

What can't be fused runs module by module, with the reason on record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.engine.fused_native import native_pass
from paceline.engine.fused_ops import OpsPass, Product
from paceline.engine.fused_pass import FusedPass

if TYPE_CHECKING:
    from paceline.attention.base import AttentionBackend
    from paceline.kv.pool import KVPool
    from paceline.layers.decoder import Decoder

__all__ = ["FusedPass", "fuse"]


def fuse(
    net: Decoder | str,
    pool: KVPool,
    backend: AttentionBackend,
    aux_layers: tuple[int, ...] = (),
    product: type[Product] = Product,
) -> FusedPass | str:
    """Return the fused pass, or the reason why there is none, as a clause.

    Args:
        net: the network's parts, or why it has none that can be laid open.
        pool: its pool.
        backend: its attention.
        aux_layers: layers that will be tapped; the network itself complains of wrong ones.
        product: how matrices are multiplied where there is a choice: in a pass of operators.
    """
    if isinstance(net, str):
        return net
    if any(not 0 <= index < len(net.layers) for index in aux_layers):
        return "a tapped layer does not exist"
    if backend.fusable:
        return native_pass(net, pool)
    if pool.device.type == "cuda":
        return OpsPass(net, pool, backend, product)
    return "attention is not an own CPU kernel"
