"""Attention of a prompt's pass through FlashAttention, as PyTorch carries it: rows of any length, no mask.

Keys and values of each row are gathered from its pages, padded to what the page table can hold; lengths
stay on the device. Queries are taken as they lie, row after row, and a key/value head serves its query
heads without a copy. Causality is aligned to the end of a row's keys, which is where its queries stand, and
in such a pass a token's position is its place, so that a window of positions is one of places.

Why not `scaled_dot_product_attention`, which takes a mask: for 16 bits and a mask it prefers cuDNN, which
makes a plan for every new pair of lengths and keeps it for ever. On an H200 that took 75 ms and 2 MB of host
memory for each length that a prompt had (docs/performance.md).

FlashAttention-2: Dao, arXiv 2307.08691.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.ops.reference.kv import slots_of

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.batch import AttnSite, ForwardBatch
    from paceline.kv.pool import KVPool

_GATHER_BYTES = 2 << 30  # most bytes of gathered keys and values that exist at once


class FlashPrompts:
    """Serves EXTEND passes on a CUDA device in 16 bits; who asks has seen to that.

    Letters: B rows, T tokens, Hq/Hkv heads, D head size, K keys that a row of the page table can hold.
    """

    def __init__(self) -> None:
        self._batch: ForwardBatch | None = None
        self._slots = self._lens = self._offsets = torch.empty(0)

    def plan(self, batch: ForwardBatch) -> None:
        """Forget the last pass."""
        del batch
        self._batch = None

    def heads(self, site: AttnSite, q: Tensor, pool: KVPool, batch: ForwardBatch) -> Tensor:
        """See `AttentionBackend`; [T, Hq, D] in, [T, Hq, D] out, zeros for dead tokens."""
        if batch.num_rows == 0 or q.shape[0] == 0:
            return torch.zeros_like(q)
        if self._batch is not batch:
            self._lay_out(batch, pool.page_size)
        slots, num_keys = self._slots, self._slots.shape[1]
        row_bytes = 2 * num_keys * pool.k.shape[1] * pool.k.shape[3] * pool.k.element_size()
        step = max(1, _GATHER_BYTES // row_bytes)
        place = torch.arange(q.shape[0], device=q.device)
        out = torch.zeros_like(q)
        for start in range(0, batch.num_rows, step):
            stop = min(start + step, batch.num_rows)
            k, v = (
                cache[site.index][:, slots[start:stop]].flatten(1, 2).transpose(0, 1)
                for cache in (pool.k, pool.v)
            )  # [b * K, Hkv, D]
            found = torch.ops.aten._flash_attention_forward(
                q.to(pool.dtype),
                k,
                v,
                self._offsets[start : stop + 1],
                torch.arange(0, k.shape[0] + 1, num_keys, device=q.device, dtype=torch.int32),
                batch.q_len,
                num_keys,
                0.0,  # dropout
                True,  # causal
                False,  # no mask for debugging
                scale=site.scale,
                window_size_left=None if site.window is None else site.window - 1,
                window_size_right=None if site.window is None else 0,
                seqused_k=self._lens[start:stop],
            )[0]
            # What lies outside these rows was not written.
            inside = (place >= self._offsets[start]) & (place < self._offsets[stop])
            out = torch.where(inside[:, None, None], found.to(q.dtype), out)
        return out

    def _lay_out(self, batch: ForwardBatch, page_size: int) -> None:
        """Slots [B, K] of each row's keys, their number [B] and where queries begin [B + 1]."""
        real = slice(batch.num_rows)
        lens = batch.prefix_lens[real] + batch.tail_lens[real]
        place = torch.arange(batch.pages.shape[1] * page_size, device=lens.device)
        row = torch.arange(batch.num_rows, device=lens.device)[:, None]
        slots = slots_of(batch.pages, row, place[None], page_size)
        # Behind a row's keys nothing is read; stale memory there is nobody's business.
        self._slots = torch.where(place < lens[:, None], slots, slots[:, :1])
        self._lens = lens.to(torch.int32)
        self._offsets = batch.cu_q[: batch.num_rows + 1].to(torch.int32)
        self._batch = batch
