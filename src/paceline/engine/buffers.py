"""Builds the `ForwardBatch` of a step from a plan and the row table.

Places: a verify writes selected node i of a row at cache place lens + i, whatever its depth; its
position (rope, noise) is lens + depth. After the walk the accepted path is moved together, so
that place == position holds again for everything cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline import ops
from paceline.core.batch import ForwardBatch, ForwardMode

if TYPE_CHECKING:
    from paceline.core.tree import DraftTree, Selection
    from paceline.engine.plan import Chunk
    from paceline.engine.rows import RowTable


def extend_batch(chunks: tuple[Chunk, ...], rows: RowTable) -> ForwardBatch:
    """Prefill chunks, ragged and causal; `logits_at` points at the tokens that are picked from."""
    token_ids: list[int] = []
    places: list[int] = []
    owner: list[int] = []
    cu_q = [0]
    picked = []
    for chunk in chunks:
        token_ids += chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
        places += range(chunk.start, chunk.start + chunk.count)
        owner += [chunk.sequence.row] * chunk.count
        cu_q.append(len(token_ids))
        if chunk.picks:
            picked.append(len(token_ids) - 1)
    place = _tensor(places, rows.device)
    row_ids = _tensor([c.sequence.row for c in chunks], rows.device)
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        num_rows=len(chunks),
        q_len=max(c.count for c in chunks),
        rows=row_ids,
        token_ids=_tensor(token_ids, rows.device),
        positions=place,
        slots=rows.slots(_tensor(owner, rows.device), place),
        prefix_lens=_tensor([c.start for c in chunks], rows.device),
        cu_q=_tensor(cu_q, rows.device),
        tail_lens=_tensor([c.count for c in chunks], rows.device),
        mask=None,
        pages=rows.pages.tensor[row_ids, : max(len(c.sequence.pages) for c in chunks)],
        logits_at=_tensor(picked, rows.device),
    )


def verify_batch(
    tree: DraftTree,
    chosen: Selection,
    row_ids: Tensor,
    rows: RowTable,
    *,
    q_len: int,
    num_pages: int,
) -> ForwardBatch:
    """The selected nodes of every row as one BLOCK pass.

    Args:
        tree: proposals of the rows, [B, N].
        chosen: the T nodes to verify.
        row_ids: [B] int64.
        rows: the row table.
        q_len: most nodes of one row (a host bound).
        num_pages: most pages of one row (a host bound).
    """
    token_ids, positions, slots, prefix_lens, tail_lens, pages = ops.verify_inputs(
        tree,
        chosen,
        row_ids,
        rows.lens,
        rows.pages.tensor,
        page_size=rows.page_size,
        dummy_page=rows.pages.dummy_page,
        num_pages=num_pages,
    )
    return ForwardBatch(
        mode=ForwardMode.BLOCK,
        num_rows=row_ids.shape[0],
        q_len=q_len,
        rows=row_ids,
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        prefix_lens=prefix_lens,
        cu_q=chosen.cu_q,
        tail_lens=tail_lens,
        mask=None if tree.token_ids.shape[1] == 1 else chosen.mask,  # a root sees all before it
        pages=pages,
    )


def _tensor(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
