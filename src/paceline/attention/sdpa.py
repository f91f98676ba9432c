"""Attention on a CUDA device through PyTorch's own kernels: keys gathered, heads packed.

A step up from the reference where no paged kernel serves: it stays in 16 bits and lets the library
choose among its fused kernels, but for cuDNN's, which keeps a plan for every new shape (`flash.py`). Query heads of a key/value head are packed as extra queries, so a key is
gathered and read once for all of them. Bits may depend on which rows share a pass.

A place beyond a row's keys is read at the row's own first place and hidden, so stale memory never
enters a product; unlike in the reference, a number that is not finite in a key that *one* query of a
row sees spoils the row's other queries too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from paceline.ops.reference.attention import PaddedView, padded_view, visible

if TYPE_CHECKING:
    from paceline.core.batch import AttnSite, ForwardBatch
    from paceline.kv.layout import KVLayout
    from paceline.kv.pool import KVPool

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_GATHER_BYTES = 2 << 30  # most bytes of gathered keys and values that exist at once


class SdpaAttention:
    """Gather, then `scaled_dot_product_attention`. Letters as in `ops/reference/attention.py`."""

    invariant = False
    fusable = False

    def __init__(self) -> None:
        self._batch: ForwardBatch | None = None
        self._view: PaddedView | None = None
        self._slots: Tensor | None = None
        self._masks: dict[tuple[int | None, str], Tensor] = {}

    def refuses(
        self,
        layout: KVLayout,  # noqa: ARG002 (any)
        device: torch.device,
        dtype: torch.dtype,
        page_size: int,  # noqa: ARG002 (any)
    ) -> str | None:
        """Serve 16-bit pools on CUDA devices."""
        if device.type != "cuda":
            return f"it is for CUDA devices, not for {device.type}"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it is for bfloat16 and float16, not for {dtype}"
        return None

    def plan(self, batch: ForwardBatch) -> None:
        """Forget the last pass."""
        self._batch = batch
        self._view = self._slots = None
        self._masks = {}

    def heads(self, site: AttnSite, q: Tensor, pool: KVPool, batch: ForwardBatch) -> Tensor:
        """Attend over the pool's pages; [T, Hq, D] in, [T, Hq, D] out."""
        if batch.num_rows == 0 or q.shape[0] == 0:
            return torch.zeros_like(q)
        if self._batch is not batch:
            self.plan(batch)
        view, slots = self._layout(batch, pool.page_size)
        num_rows, q_len = view.query_at.shape
        num_heads, dim = q.shape[1:]
        kv_heads = pool.k.shape[1]
        group = num_heads // kv_heads
        row_bytes = 2 * slots.shape[1] * kv_heads * dim * q.element_size()
        step = max(1, _GATHER_BYTES // row_bytes)
        grouped = q[view.query_at].view(num_rows, q_len, kv_heads, group, dim)
        packed = grouped.permute(0, 2, 3, 1, 4).reshape(num_rows, kv_heads, group * q_len, dim)
        parts = []
        for start in range(0, num_rows, step):
            rows = slice(start, min(start + step, num_rows))
            k = pool.k[site.index][:, slots[rows]].transpose(0, 1)  # [b, Hkv, K, D]
            v = pool.v[site.index][:, slots[rows]].transpose(0, 1)
            sees = self._mask(site, view)[rows].repeat(1, group, 1).unsqueeze(1)
            with sdpa_kernel(_KERNELS):
                parts.append(
                    scaled_dot_product_attention(
                        packed[rows], k, v, attn_mask=sees, scale=site.scale
                    )
                )
        out = torch.cat(parts) if len(parts) > 1 else parts[0]
        flat = out.view(num_rows, kv_heads, group, q_len, dim).permute(0, 3, 1, 2, 4)
        flat = flat.reshape(num_rows * q_len, num_heads, dim)
        return flat[view.back].masked_fill_(view.dead[:, None, None], 0)

    def _layout(self, batch: ForwardBatch, page_size: int) -> tuple[PaddedView, Tensor]:
        """Padded rows of the pass, and the slots to gather: none beyond a row's own keys."""
        if self._view is None or self._slots is None:
            self._view = padded_view(batch, page_size)
            place = torch.arange(self._view.slots.shape[1], device=self._view.slots.device)
            own = place < self._view.prefix_lens + self._view.tail_lens
            self._slots = torch.where(own, self._view.slots, self._view.slots[:, :1])
        return self._view, self._slots

    def _mask(self, site: AttnSite, view: PaddedView) -> Tensor:
        """[B, Q, K] bool of what each query sees; the same for all layers with such a site."""
        key = (site.window, site.tail)
        if key not in self._masks:
            rows, q_len = view.query_at.shape
            sees = visible(view, site, slice(0, rows), slice(0, q_len))
            # A query without any key would divide by nothing; its output is dead anyway.
            sees[..., 0] |= ~sees.any(-1)
            self._masks[key] = sees
        return self._masks[key]
