"""NetworkRuntime: what the engine lends a drafter network.

The draft pool at the target's slot numbers, passes over it, and the rows' state.

Letters: B rows, q queries per row, T tokens, W mask words, H hidden size.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline import ops
from paceline.attention.base import PagedAttend
from paceline.core.batch import ForwardBatch, ForwardMode, ForwardOutput
from paceline.engine.fused import FusedPass, fuse
from paceline.ops.context import context_write
from paceline.ops.drafts import noise_ahead

if TYPE_CHECKING:
    from paceline.attention.base import AttentionBackend
    from paceline.draft.base import DraftNet
    from paceline.engine.rows import RowTable
    from paceline.kv.pool import KVPool

log = logging.getLogger(__name__)


class NetworkRuntime:
    """`DraftRuntime`: the draft pool at the target's slot numbers, and the rows' state."""

    def __init__(self, rows: RowTable, pool: KVPool | None, backend: AttentionBackend) -> None:
        self._rows = rows
        self._pool = pool
        self._backend = backend
        self._fused: dict[DraftNet, FusedPass | None] = {}

    @property
    def num_rows(self) -> int:
        """See `DraftRuntime`."""
        return self._rows.lens.shape[0] - 1

    def lens(self, rows: Tensor) -> Tensor:
        """See `DraftRuntime`."""
        return self._rows.lens[rows]

    def next_token(self, rows: Tensor) -> Tensor:
        """See `DraftRuntime`."""
        return self._rows.next_token[rows]

    def temperature(self, rows: Tensor) -> Tensor:
        """See `DraftRuntime`."""
        return self._rows.options.temperature[rows]

    def noise(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        """See `DraftRuntime`."""
        options = self._rows.options
        return ops.keyed_noise(rows, positions, token_ids, options.key, options.temperature)

    def noise_ahead(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """See `DraftRuntime`."""
        options, lens = self._rows.options, self._rows.lens
        return noise_ahead(rows, lens, token_ids, options.key, options.temperature)

    def block(self, rows: Tensor, token_ids: Tensor, mask: Tensor) -> ForwardBatch:
        """See `DraftRuntime`."""
        width = token_ids.shape[1]
        mask = mask if token_ids.shape[0] == 1 else mask.repeat(token_ids.shape[0], 1)
        return self._pass(rows, token_ids, mask=mask, offset=0, ahead=None, tail=width)

    def newest(self, rows: Tensor, token_ids: Tensor, features: Tensor) -> ForwardBatch:
        """See `DraftRuntime`."""
        mask = torch.ones_like(rows).unsqueeze(1)
        # The place before the first new one; a padding row has none.
        batch = self._pass(rows, token_ids.unsqueeze(1), mask=mask, offset=-1, ahead=None, tail=1)
        # The entry may lie in a page that others share: not even the same bits are written again.
        return replace(batch, features=features, slots=torch.full_like(batch.slots, -1))

    def level(
        self, rows: Tensor, token_ids: Tensor, features: Tensor, mask: Tensor, depth: int
    ) -> ForwardBatch:
        """See `DraftRuntime`."""
        width = token_ids.shape[1]
        first = (depth - 1) * width
        batch = self._pass(
            rows,
            token_ids,
            mask=mask.flatten(0, 1),
            offset=first,
            ahead=depth - 1,
            tail=first + width,
        )
        return replace(batch, features=features.flatten(0, 1))

    def _pass(
        self,
        rows: Tensor,
        token_ids: Tensor,
        *,
        mask: Tensor,
        offset: int,
        ahead: int | None,
        tail: int,
    ) -> ForwardBatch:
        """A BLOCK pass over the rows' draft keys; its queries are the last of `tail` keys a row.

        Args:
            rows: [B] int64.
            token_ids: [B, q] int64.
            mask: [B * q, W] int64.
            offset: the queries lie at the q places from lens + offset on.
            ahead: all are at position lens + ahead; None: each is at its place.
            tail: keys; what lies before them is prefix.
        """
        table = self._rows
        positions, slots, prefix_lens, cu_q, tail_lens, pages = ops.draft_inputs(
            rows,
            table.lens,
            table.pages.tensor,
            width=token_ids.shape[1],
            offset=offset,
            ahead=ahead,
            tail=tail,
            page_size=table.page_size,
            dummy_page=table.pages.dummy_page,
            num_pages=table.num_pages,
        )
        return ForwardBatch(
            mode=ForwardMode.BLOCK,
            num_rows=token_ids.shape[0],
            q_len=token_ids.shape[1],
            rows=rows,
            token_ids=token_ids.reshape(-1),
            positions=positions,
            slots=slots,
            prefix_lens=prefix_lens,
            cu_q=cu_q,
            tail_lens=tail_lens,
            mask=mask,
            pages=pages,
        )

    def forward(self, net: DraftNet, batch: ForwardBatch) -> ForwardOutput:
        """See `DraftRuntime`."""
        assert self._pool is not None, "a network without a cache has no paged pass"
        fused = self._fused_pass(net, self._pool)
        if fused is not None:
            return fused.forward(batch, ())
        self._backend.plan(batch)
        return net(batch, PagedAttend(self._backend, self._pool, batch))

    def _fused_pass(self, net: DraftNet, pool: KVPool) -> FusedPass | None:
        if net not in self._fused:
            found = fuse(net.decoder(), pool, self._backend)
            self._fused[net] = found if isinstance(found, FusedPass) else None
            log.debug("draft layers run %s", found if isinstance(found, str) else "in one call")
        return self._fused[net]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """See `DraftRuntime`."""
        assert self._pool is not None, "a network without a cache writes nothing"
        self._pool.write(layer, slots, k, v)

    def write_context(
        self,
        product: Tensor,
        positions: Tensor,
        slots: Tensor,
        cos_sin: Tensor,
        gains: Tensor,
        eps: float,
    ) -> None:
        """See `DraftRuntime`."""
        assert self._pool is not None, "a network without a cache writes nothing"
        caches = self._pool.k, self._pool.v
        context_write(product, positions, cos_sin, slots, *caches, gains, eps)
