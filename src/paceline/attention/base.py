"""The seam between models and attention: `AttentionBackend`, and `PagedAttend` which binds one.

A model calls `attend.heads(site, q, k, v)` and knows no more. In service that is a `PagedAttend`:
it writes k and v to the pool's slots and asks the backend to attend over the row's pages.

Letters: T tokens, Hq/Hkv query and key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.ops import calls

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from paceline.core.batch import AttnSite, ForwardBatch
    from paceline.kv.layout import KVLayout
    from paceline.kv.pool import KVPool


class AttentionBackend(Protocol):
    """One way to compute attention over a paged cache. Made without arguments, one per runner.

    Whoever runs a pass calls `plan` once, before the first layer; `heads` then serves every layer.

    Attributes:
        invariant: a query's bits do not depend on the other rows and queries of its pass.
        fusable: it is an own CPU kernel, which `ops.cpu.stack` can call between the others.
    """

    invariant: bool
    fusable: bool

    def refuses(
        self, layout: KVLayout, device: torch.device, dtype: torch.dtype, page_size: int
    ) -> str | None:
        """Return why this backend cannot serve such a pool, as a clause; None if it can."""
        ...

    def plan(self, batch: ForwardBatch) -> None:
        """Take note of a new pass: forget what was derived from the last one."""
        ...

    def heads(self, site: AttnSite, q: Tensor, pool: KVPool, batch: ForwardBatch) -> Tensor:
        """Attend; the keys of this pass are already in the pool.

        Which keys a query sees is said by `ForwardBatch` and `AttnSite`. A key that it does not
        see never enters a product. Dead tokens (at or beyond cu_q[B]) get zeros.

        Args:
            site: layer index, scale, window, tail rule.
            q: [T, Hq, D], rope applied; Hq is a multiple of Hkv.
            pool: where keys and values are.
            batch: the pass.

        Returns:
            [T, Hq, D] in q's dtype.
        """
        ...


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """The `Attend` of service: a backend, a pool and the pass that `backend.plan` was told of."""

    backend: AttentionBackend
    pool: KVPool
    batch: ForwardBatch

    def heads(self, site: AttnSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [T, Hkv, D] to the batch's slots, attend, return [T, Hq, D]."""
        self.pool.write(site.index, self.batch.slots, k, v)
        return self.written(site, q)

    def written(self, site: AttnSite, q: Tensor) -> Tensor:
        """Attend with q [T, Hq, D] where keys and values are in the pool already."""
        if calls.ANNOUNCES:
            batch, by = self.batch, type(self.backend).__name__
            tails = (batch.prefix_lens, batch.tail_lens, batch.cu_q, batch.mask, batch.pages)
            calls.announce("attention", by, q, self.pool.k[site.index], *tails, site)
        return self.backend.heads(site, q, self.pool, self.batch)
