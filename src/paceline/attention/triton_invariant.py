"""The CUDA backend of the batch-invariant mode: a query's bits depend on its own keys alone.

Prompts, plain decoding and every tree go through the same kernels (`ops/triton/attention_invariant.py`),
since a row's cache holds keys of all three. It costs: queries of a row share less of what they read.

Letters: T tokens, Hq query heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.attention.triton import TritonAttention
from paceline.ops.triton.grid import WorkSpace

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.batch import AttnSite, ForwardBatch
    from paceline.kv.layout import KVLayout
    from paceline.kv.pool import KVPool
    from paceline.ops.triton.attention_invariant import Paths


class InvariantTritonAttention:
    """Implements `AttentionBackend`.

    Args:
        split: whether a program takes a unit of keys or all; None: by the number of programs. It
            changes no bit; for tests.
    """

    invariant = True
    fusable = False

    def __init__(self, split: bool | None = None) -> None:
        self._split = split
        self._work = WorkSpace()
        self._paths: Paths | None = None

    def refuses(
        self, layout: KVLayout, device: torch.device, dtype: torch.dtype, page_size: int
    ) -> str | None:
        """See `AttentionBackend`; what the other kernels serve."""
        return TritonAttention().refuses(layout, device, dtype, page_size)

    def plan(self, batch: ForwardBatch) -> None:
        """Forget the last pass; the first layer lists the paths."""
        del batch
        self._paths = None

    def heads(self, site: AttnSite, q: Tensor, pool: KVPool, batch: ForwardBatch) -> Tensor:
        """See `AttentionBackend`. Queries of another dtype than the pool's are converted."""
        if batch.num_rows == 0 or batch.q_len == 0 or q.shape[0] == 0:
            return torch.zeros_like(q)
        from paceline.ops.triton.attention_invariant import attend, paths_of

        if self._paths is None and batch.mask is not None:
            self._paths = paths_of(
                batch.mask,
                cu_q=batch.cu_q,
                prefix_lens=batch.prefix_lens,
                pages=batch.pages,
                page_size=pool.page_size,
                num_rows=batch.num_rows,
                q_len=batch.q_len,
            )
        out = attend(
            q.to(pool.dtype),
            pool.k[site.index],
            pool.v[site.index],
            paths=self._paths,
            work=self._work,
            num_rows=batch.num_rows,
            q_len=batch.q_len,
            pages=batch.pages,
            prefix_lens=batch.prefix_lens,
            tail_lens=batch.tail_lens,
            cu_q=batch.cu_q,
            positions=batch.positions,
            page_size=pool.page_size,
            scale=site.scale,
            window=site.window,
            causal=site.tail == "causal",
            split=self._split,
        )
        return out.to(q.dtype)
