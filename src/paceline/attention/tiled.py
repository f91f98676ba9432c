"""TiledAttention: the CPU's attention where the own kernel can't serve, in plain PyTorch.

As there, a query's bits depend on its own visible keys, in path order, and on nothing else, so
speculation can't change what is emitted. It costs: every query gathers its own keys.

Letters: T tokens, Hq query heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.core.batch import AttnSite
from paceline.ops.cpu import tiles
from paceline.ops.reference.attention import padded_view, visible

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.batch import ForwardBatch
    from paceline.kv.layout import KVLayout
    from paceline.kv.pool import KVPool

_ENTRIES = 1 << 19  # most (query, key, head) that are worked on together: some tens of megabytes
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TiledAttention:
    """Implements `AttentionBackend`; see `ops/cpu/tiles.py`."""

    invariant = True
    fusable = False

    def __init__(self) -> None:
        self._works: dict[tuple[int | None, str], list[tiles.Work]] = {}
        self._batch: ForwardBatch | None = None

    def refuses(
        self, layout: KVLayout, device: torch.device, dtype: torch.dtype, page_size: int
    ) -> str | None:
        """Serve 16- and 32-bit pools on a CPU that treats all rows alike."""
        del page_size
        if device.type != "cpu":
            return f"it runs on a CPU, not on {device.type}"
        if dtype not in _DTYPES:
            return f"it serves float32, bfloat16 and float16, not {str(dtype)[6:]}"
        return tiles.refusal(layout.head_dim)

    def plan(self, batch: ForwardBatch) -> None:
        """Forget the last pass."""
        self._batch = batch
        self._works = {}

    def heads(self, site: AttnSite, q: Tensor, pool: KVPool, batch: ForwardBatch) -> Tensor:
        """Attend over the pool's pages; [T, Hq, D] in, [T, Hq, D] out."""
        out = torch.zeros_like(q)
        if batch.num_rows == 0 or batch.q_len == 0 or q.shape[0] == 0:
            return out
        if self._batch is not batch:
            self.plan(batch)
        key = (site.window, site.tail)
        if key not in self._works:
            self._works[key] = _works(batch, pool, site)
        k_cache, v_cache = pool.k[site.index], pool.v[site.index]
        for work in self._works[key]:
            out[work.queries] = tiles.attend(q, k_cache, v_cache, work, site.scale).to(q.dtype)
        return out


def _works(batch: ForwardBatch, pool: KVPool, site: AttnSite) -> list[tiles.Work]:
    """The pass row by row, and long rows in parts."""
    view = padded_view(batch, pool.page_size)
    everywhere = AttnSite(index=site.index, scale=site.scale, tail=site.tail)
    starts = batch.cu_q.tolist()
    works = []
    for b in range(batch.num_rows):
        row, count = slice(b, b + 1), starts[b + 1] - starts[b]
        step = max(1, _ENTRIES // (view.slots.shape[1] * pool.k.shape[1]))
        for first in range(0, count, step):
            queries = slice(first, min(first + step, count))
            # A window hides keys, but leaves the others their places in the list.
            listed, sees = (visible(view, s, row, queries)[0] for s in (everywhere, site))
            flat = torch.arange(starts[b] + queries.start, starts[b] + queries.stop)
            works.append(tiles.work_of(flat, view.slots[b], listed, sees))
    return works
