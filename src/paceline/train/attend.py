"""The `Attend`s of training: dense attention over packed rows, differentiable, on any device.

`PackedCausal` is what the target runs with: every token sees its own sequence up to itself. `Blocks` is
what the draft network runs with: every row of a block sees the context keys of its sequence at positions
before its anchor, strictly, and its own block; other blocks never. That is what serving lets a block see
(DFlash, arXiv 2602.06036, section 4: "own block and clean context").

Both honour a site's window and tail rule as the paged backends do.

Letters: S rows, C tokens of a row, N anchors of a row, b rows of a block, Hq/Hkv heads, g = Hq / Hkv,
D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline.core.batch import AttnSite, ForwardBatch, ForwardMode

if TYPE_CHECKING:
    from paceline.train.packing import Batch


@dataclass(frozen=True, slots=True)
class PackedCausal:
    """Causal attention within the sequences of packed rows.

    Padding sees itself, so that no query is without a key.
    """

    docs: Tensor  # [S, C] int32
    positions: Tensor  # [S, C] int64

    def heads(self, site: AttnSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [S * C, Hq, D], k and v [S * C, Hkv, D] -> [S * C, Hq, D]."""
        rows, size = self.docs.shape
        heads, dim = q.shape[1:]
        group = heads // k.shape[1]

        def split(x: Tensor) -> Tensor:
            return x.view(rows, size, -1, dim).transpose(1, 2)

        def repeated(x: Tensor) -> Tensor:  # the fused kernels with a mask want equal heads
            return x.repeat_interleave(group, dim=1)

        out = scaled_dot_product_attention(
            split(q),
            repeated(split(k)),
            repeated(split(v)),
            attn_mask=self._sees(site).unsqueeze(1),
            scale=site.scale,
        )
        return out.transpose(1, 2).reshape(rows * size, heads, dim)

    def _sees(self, site: AttnSite) -> Tensor:
        """[S, C, C] bool."""
        place = torch.arange(self.docs.shape[1], device=self.docs.device)
        sees = self.docs[:, :, None] == self.docs[:, None, :]
        sees = sees & (place <= place[:, None])
        if site.window is not None:
            far = self.positions[:, :, None] - self.positions[:, None, :] >= site.window
            sees = sees & ~far
        return sees


@dataclass(frozen=True, slots=True)
class Blocks:
    """Attention of draft blocks to the context of their sequence and to themselves.

    Scores against the context are one product per row and key/value head, scores within the blocks one
    small product per block; one softmax runs over both.
    """

    context: Sequence[tuple[Tensor, Tensor]]  # per layer: keys, values [S * C, Hkv, D]
    docs: Tensor  # [S, C] int32
    positions: Tensor  # [S, C] int64
    anchors: Tensor  # [S, N] int64 places
    block: int  # b

    def heads(self, site: AttnSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [S * N * b, Hq, D], k and v [S * N * b, Hkv, D] -> [S * N * b, Hq, D]."""
        rows, size = self.docs.shape
        num, block = self.anchors.shape[1], self.block
        kv_heads, dim = k.shape[1:]
        group = q.shape[1] // kv_heads
        keys, values = (x.view(rows, size, kv_heads, dim) for x in self.context[site.index])

        q = (q * site.scale).view(rows, num, block, kv_heads, group, dim)
        packed = q.permute(0, 3, 4, 1, 2, 5)  # [S, Hkv, g, N, b, D]
        far = packed.reshape(rows, kv_heads, -1, dim) @ keys.permute(0, 2, 3, 1)
        far = far.view(rows, kv_heads, group, num, block, size)
        far = far.masked_fill(~self._sees_context(site)[:, None, None], -torch.inf)

        near = q.permute(0, 1, 3, 4, 2, 5).reshape(rows, num, kv_heads, -1, dim)  # g * b queries
        own_k = k.view(rows, num, block, kv_heads, dim)
        own_v = v.view(rows, num, block, kv_heads, dim)
        near = near @ own_k.permute(0, 1, 3, 4, 2)  # [S, N, Hkv, g * b, b]
        near = near.view(rows, num, kv_heads, group, block, block)
        near = near.masked_fill(~self._sees_block(site), -torch.inf).permute(0, 2, 3, 1, 4, 5)

        probs = torch.cat((far, near), dim=-1).softmax(-1)
        far, near = probs[..., :size], probs[..., size:]
        out = far.reshape(rows, kv_heads, -1, size) @ values.transpose(1, 2)
        out = out.view(rows, kv_heads, group, num, block, dim)
        near = near.permute(0, 3, 1, 2, 4, 5).reshape(rows, num, kv_heads, -1, block)
        near = near @ own_v.transpose(2, 3)  # [S, N, Hkv, g * b, D]
        near = near.view(rows, num, kv_heads, group, block, dim).permute(0, 2, 3, 1, 4, 5)
        return (out + near).permute(0, 3, 4, 1, 2, 5).reshape(-1, kv_heads * group, dim)

    def _sees_context(self, site: AttnSite) -> Tensor:
        """[S, N, b or 1, C] bool: same sequence, before the anchor, within the window."""
        place = torch.arange(self.docs.shape[1], device=self.docs.device)
        own = self.docs.gather(1, self.anchors)  # [S, N]
        sees = self.docs[:, None, :] == own[:, :, None]
        sees = (sees & (place < self.anchors[:, :, None]))[:, :, None]
        if site.window is None:
            return sees
        start = self.positions.gather(1, self.anchors)[:, :, None]
        row_at = start + torch.arange(self.block, device=self.docs.device)  # [S, N, b]
        far = row_at[:, :, :, None] - self.positions[:, None, None, :] >= site.window
        return sees & ~far

    def _sees_block(self, site: AttnSite) -> Tensor:
        """[b, b] bool: which rows of a block a row of it sees."""
        row = torch.arange(self.block, device=self.docs.device)
        back = row[:, None] - row
        sees = torch.ones_like(back, dtype=torch.bool)
        if site.tail == "causal":
            sees = back >= 0
        if site.window is not None:
            sees = sees & (back < site.window)
        return sees


def packed_pass(batch: Batch) -> ForwardBatch:
    """The target's pass over packed rows: every token, nothing cached."""
    rows, size = batch.token_ids.shape
    return _pass(batch.token_ids.view(-1), batch.positions.view(-1), rows, size)


def block_pass(batch: Batch, block: int, mask_token: int) -> ForwardBatch:
    """The drafter's pass: [anchor's token, MASK, ...] for every anchor, flat [S * N * b]."""
    rows, num = batch.anchors.shape
    step = torch.arange(block, device=batch.anchors.device)
    first = batch.token_ids.gather(1, batch.anchors)
    masked = torch.full_like(step, mask_token)
    token_ids = torch.where(step == 0, first[:, :, None], masked)
    positions = batch.positions.gather(1, batch.anchors)[:, :, None] + step
    return _pass(token_ids.view(-1), positions.view(-1), rows * num, block)


def _pass(token_ids: Tensor, positions: Tensor, rows: int, size: int) -> ForwardBatch:
    """A pass of `rows` rows of `size` queries without a cache: pages and slots are not used."""
    zeros = torch.zeros(rows, dtype=torch.int64, device=token_ids.device)
    return ForwardBatch(
        mode=ForwardMode.BLOCK,
        num_rows=rows,
        q_len=size,
        rows=zeros,
        token_ids=token_ids,
        positions=positions,
        slots=torch.full_like(token_ids, -1),
        prefix_lens=zeros,
        cu_q=torch.arange(rows + 1, device=token_ids.device) * size,
        tail_lens=zeros + size,
        mask=None,
        pages=zeros.view(-1, 1).to(torch.int32),
    )
