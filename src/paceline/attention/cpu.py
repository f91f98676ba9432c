"""The CPU backend: paged attention by an own kernel, for any mix of rows in one call.

A query's bits depend on its own visible keys, in path order, and on nothing else: decode, chain,
tree and prefill agree exactly, so speculation can't change what is emitted. Where the kernel can't
be built or a pool does not suit it, it refuses and the next backend serves.

Letters: T tokens, Hq query heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.ops.cpu import attention as kernel
from paceline.ops.cpu.native import DTYPES, refusal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from paceline.core.batch import AttnSite, ForwardBatch
    from paceline.kv.layout import KVLayout
    from paceline.kv.pool import KVPool


class CpuAttention:
    """Implements `AttentionBackend`."""

    invariant = True
    fusable = True

    def __init__(self) -> None:
        self._planned: kernel.Planned | None = None

    def refuses(
        self, layout: KVLayout, device: torch.device, dtype: torch.dtype, page_size: int
    ) -> str | None:
        """See `AttentionBackend`; any page size will do."""
        del page_size
        if device.type != "cpu":
            return f"it runs on a CPU, not on {device.type}"
        return kernel.refuses(dtype, layout.head_dim) or refusal(dtype)

    def plan(self, batch: ForwardBatch) -> None:
        """Forget the last pass; the first layer makes the plan, as it knows the pool."""
        del batch
        self._planned = None

    def heads(self, site: AttnSite, q: Tensor, pool: KVPool, batch: ForwardBatch) -> Tensor:
        """See `AttentionBackend`. Queries of a dtype that is not served go as the pool's."""
        k_cache, v_cache = pool.k[site.index], pool.v[site.index]
        kind = q.dtype if q.dtype in DTYPES else pool.dtype
        planned = self._planned
        if planned is None or planned.q_dtype != kind:
            planned = self._planned = kernel.plan(
                num_rows=batch.num_rows,
                positions=batch.positions,
                prefix_lens=batch.prefix_lens,
                cu_q=batch.cu_q,
                tail_lens=batch.tail_lens,
                mask=batch.mask,
                pages=batch.pages,
                page_size=pool.page_size,
                q_heads=q.shape[1],
                q_dtype=kind,
                k_cache=k_cache,
            )
        out = kernel.attend(
            planned,
            q.to(kind),
            k_cache,
            v_cache,
            scale=site.scale,
            window=site.window,
            causal=site.tail == "causal",
        )
        return out.to(q.dtype)
