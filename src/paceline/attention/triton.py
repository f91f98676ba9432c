"""The CUDA backend: paged attention by own kernels, for every kind of BLOCK pass.

Keys are read where they lie, once for all query heads and all nodes of a row. A prompt's pass
(EXTEND) goes to PyTorch's FlashAttention, over gathered keys (`flash.py`): its time is in the products, not
in the keys. Bits may
depend on the number of rows, on the nodes of the longest one and on the page table's width, which
choose the tiles, so it is not batch-invariant; they do not depend on the order in which programs run.

The kernels are in `ops/triton/attention.py`; Triton is imported when a pool on a CUDA device asks.

Letters: T tokens, Hq query heads, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.attention.flash import FlashPrompts
from paceline.attention.sdpa import SdpaAttention
from paceline.core.batch import ForwardMode
from paceline.ops.triton.grid import Shape, Tiles, WorkSpace, refusal, shape

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.batch import AttnSite, ForwardBatch
    from paceline.kv.layout import KVLayout
    from paceline.kv.pool import KVPool


class TritonAttention:
    """Implements `AttentionBackend`.

    Args:
        tiles: how the kernels work, instead of the choice by shape; for tests and for tuning.
    """

    invariant = False
    fusable = False

    def __init__(self, tiles: Tiles | None = None) -> None:
        flash = torch.backends.cuda.is_flash_attention_available()  # a build may lack it
        self._prompts = FlashPrompts() if flash else SdpaAttention()
        self._tiles = tiles
        self._work = WorkSpace()
        self._shape: Shape | None = None

    def refuses(
        self, layout: KVLayout, device: torch.device, dtype: torch.dtype, page_size: int
    ) -> str | None:
        """See `AttentionBackend`; any page size will do."""
        del page_size
        if device.type != "cuda":
            return f"it is for CUDA devices, not for {device.type}"
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs a GPU of compute capability 8.0 or more"
        return refusal(dtype, layout.head_dim)

    def plan(self, batch: ForwardBatch) -> None:
        """Forget the last pass; the first layer chooses the grid, as it knows the heads."""
        self._prompts.plan(batch)
        self._shape = None

    def heads(self, site: AttnSite, q: Tensor, pool: KVPool, batch: ForwardBatch) -> Tensor:
        """See `AttentionBackend`. Queries of another dtype than the pool's are converted."""
        if batch.mode is ForwardMode.EXTEND:
            return self._prompts.heads(site, q, pool, batch)
        if batch.num_rows == 0 or batch.q_len == 0 or q.shape[0] == 0:
            return torch.zeros_like(q)
        from paceline.ops.triton.attention import attend

        if self._shape is None:
            self._shape = shape(
                num_rows=batch.num_rows,
                q_len=batch.q_len,
                num_keys=batch.pages.shape[1] * pool.page_size,
                q_heads=q.shape[1],
                kv_heads=pool.k.shape[1],
                dim=q.shape[2],
                tiles=self._tiles,
            )
        out = attend(
            q.to(pool.dtype),
            pool.k[site.index],
            pool.v[site.index],
            planned=self._shape,
            work=self._work,
            pages=batch.pages,
            prefix_lens=batch.prefix_lens,
            tail_lens=batch.tail_lens,
            cu_q=batch.cu_q,
            positions=batch.positions,
            mask=batch.mask,
            page_size=pool.page_size,
            scale=site.scale,
            window=site.window,
            causal=site.tail == "causal",
        )
        return out.to(q.dtype)
