"""ModelRunner: a network, its KV pool and an attention backend as one callable.

Target and drafter networks are two instances of this class in one process. It never captures
graphs and keeps no state between passes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from paceline.attention.base import PagedAttend
from paceline.core.meanwhile import Meanwhile, nothing
from paceline.engine.fused import FusedPass, fuse
from paceline.engine.fused_ops import Product

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paceline.attention.base import AttentionBackend
    from paceline.core.batch import ForwardBatch, ForwardOutput
    from paceline.kv.pool import KVPool
    from paceline.models.base import CausalLM

log = logging.getLogger(__name__)


class ModelRunner:
    """Runs `net` over a paged pool.

    Args:
        net: the network.
        pool: where its keys and values live; the only mutable thing a pass touches.
        backend: computes attention over the pool.
        aux_layers: layers whose output is tapped for a drafter.
        product: how matrices are multiplied, see `fuse`.
        head: hidden states to logits; None: the network's.
    """

    def __init__(
        self,
        net: CausalLM,
        pool: KVPool,
        backend: AttentionBackend,
        *,
        aux_layers: tuple[int, ...] = (),
        product: type[Product] = Product,
        head: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.net = net
        self.pool = pool
        self.backend = backend
        self.aux_layers = aux_layers
        fused = fuse(net.decoder(), pool, backend, aux_layers, product)
        self._head = head or net.head
        self._fused = fused if isinstance(fused, FusedPass) else None
        how = f"one by one: {fused}" if self._fused is None else type(self._fused).__name__
        log.debug("layers run as %s", how)

    @property
    def fused(self) -> bool:
        """Whether all layers run as one call of own kernels."""
        return self._fused is not None and self._fused.one_call

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, meanwhile: Meanwhile = nothing) -> ForwardOutput:
        """One pass; writes the batch's keys and values to the pool. See `core.meanwhile`."""
        if self._fused is not None:
            return self._fused.forward(batch, self.aux_layers, meanwhile)
        meanwhile()
        self.backend.plan(batch)
        attend = PagedAttend(self.backend, self.pool, batch)
        return self.net(batch, attend, self.aux_layers)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits [M, V] of final hidden states [M, H]."""
        return self._head(hidden)
