"""ReferenceAttention: plain torch on any device, every kind of visibility, the definition.

It gathers each row's keys, so it is slow at long contexts; it is what drafter training and a GPU
without a faster backend run on. Bits may depend on which rows share a pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.ops.reference.attention import PaddedView, padded_view, paged_attention

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.batch import AttnSite, ForwardBatch
    from paceline.kv.layout import KVLayout
    from paceline.kv.pool import KVPool

_LEAST_BYTES = 2  # of a number that is stored as it is


class ReferenceAttention:
    """Attention by gathering keys through the page table; see `ops/reference/attention.py`."""

    invariant = False
    fusable = False

    def __init__(self) -> None:
        self._batch: ForwardBatch | None = None
        self._view: PaddedView | None = None  # made by the first layer, used by all

    def refuses(
        self,
        layout: KVLayout,  # noqa: ARG002 (any)
        device: torch.device,  # noqa: ARG002 (any)
        dtype: torch.dtype,
        page_size: int,  # noqa: ARG002 (any)
    ) -> str | None:
        """Refuse nothing but numbers that are not floating point, or would need a scale."""
        if not dtype.is_floating_point:
            return f"{dtype} is not a floating-point type"
        if dtype.itemsize < _LEAST_BYTES:
            return f"{dtype} needs scales, for which a pool has no place"
        return None

    def plan(self, batch: ForwardBatch) -> None:
        """Forget the last pass: its tensors may have been overwritten in place."""
        self._batch = batch
        self._view = None

    def heads(self, site: AttnSite, q: Tensor, pool: KVPool, batch: ForwardBatch) -> Tensor:
        """Attend over the pool's pages; [T, Hq, D] in, [T, Hq, D] out."""
        if batch.num_rows == 0 or batch.q_len == 0 or q.shape[0] == 0:
            return torch.zeros_like(q)
        if self._batch is not batch:
            self.plan(batch)
        if self._view is None:
            self._view = padded_view(batch, pool.page_size)
        return paged_attention(q, pool.k[site.index], pool.v[site.index], self._view, site)
