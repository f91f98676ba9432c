"""Builds the `Commit` of a target pass: what became final, flat, for drafter networks.

Letters: B rows, A path length, T the pass's tokens, F width of the tapped features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline import ops
from paceline.draft.base import Commit

if TYPE_CHECKING:
    from paceline.core.batch import ForwardBatch
    from paceline.core.tree import Verdict
    from paceline.engine.plan import Chunk
    from paceline.engine.rows import RowTable


def extend_commit(
    chunks: tuple[Chunk, ...], batch: ForwardBatch, aux: Tensor | None, picked: Tensor | None
) -> Commit:
    """All tokens of the prefill chunks; `picked` are the first tokens of the picking ones."""
    next_ids: list[int] = []
    for chunk in chunks:
        known = chunk.sequence.tokens[chunk.start + 1 : chunk.start + chunk.count + 1]
        next_ids += known + [0] * (chunk.count - len(known))
    after = torch.tensor(next_ids, dtype=torch.int64, device=batch.token_ids.device)
    if picked is not None:
        assert batch.logits_at is not None, "a picking pass says where"
        after[batch.logits_at] = picked.clamp(min=0)  # a row without a token is dead
    return Commit(
        rows=batch.rows,
        cu=batch.cu_q,
        token_ids=batch.token_ids,
        next_ids=after,
        positions=batch.positions,
        slots=batch.slots,
        hidden=aux,
    )


def block_commit(
    verdict: Verdict,
    emitted: Tensor,
    batch: ForwardBatch,
    row_ids: Tensor,
    rows: RowTable,
    aux: Tensor | None,
) -> Commit:
    """The accepted paths, compacted row after row; what lies past them is dead.

    Args:
        verdict: the walk's outcome.
        emitted: [B, A] the token after each path node, -1 padded.
        batch: the verify pass.
        row_ids: [B] int64.
        rows: the row table.
        aux: [T, F] tapped features of the pass.
    """
    cu, token_ids, next_ids, positions, slots, nodes = ops.compact(
        verdict,
        emitted,
        batch.cu_q,
        row_ids,
        batch.prefix_lens,
        rows.pages.tensor,
        capacity=batch.token_ids.shape[0],
        page_size=rows.page_size,
        dummy_page=rows.pages.dummy_page,
    )
    return Commit(
        rows=row_ids,
        cu=cu,
        token_ids=token_ids,
        next_ids=next_ids,
        positions=positions,
        slots=slots,
        hidden=None if aux is None else aux[nodes],
    )
