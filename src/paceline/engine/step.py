"""The two step paths, tensor level: what runs on the device, in the order of the papers.

No host read of a device value happens here: the number of accepted tokens is data, not shape. The
caller (`engine.py`) decides what to compute and later reads the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline.engine.buffers import extend_batch, verify_batch
from paceline.engine.commits import block_commit, extend_commit
from paceline.engine.rows import emitted_tokens
from paceline.ops.reference.tree import select
from paceline.sample.sampler import Head, PickNodes, pick
from paceline.sample.verifier import verify

if TYPE_CHECKING:
    from paceline.core.stages import Stages
    from paceline.core.tree import DraftTree, Selection, Verdict
    from paceline.draft.base import Commit
    from paceline.engine.plan import Chunk
    from paceline.engine.rows import RowTable
    from paceline.engine.runner import ModelRunner
    from paceline.sample.options import SamplingTable

    Observe = Callable[[Commit], None]


class Walk(Protocol):
    """Says how far a step goes along its trees: `sample.verifier.verify`, whose arguments these are.

    Whoever measures steps passes another; an engine from `Engine.build` has only this one.
    """

    def __call__(
        self,
        tree: DraftTree,
        selection: Selection,
        hidden: Tensor,
        head: Head,
        table: SamplingTable,
        rows: Tensor,
        lens: Tensor,
        host_rows: list[int],
        /,
    ) -> Verdict:
        """Return the verdict of every row."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """What a step leaves on the device for the host to read. K top logprobs.

    EXTEND: one emitted token for each picking chunk, A = 1, B = picking chunks.
    """

    emitted: Tensor  # [B, A] int64, -1 padded; NOT_FINITE after the last token of a failed row
    path: Tensor | None  # [B, A] int64 accepted nodes as selected indices; None for EXTEND
    sources: Tensor | None  # [B, A] int8 which drafter proposed them; None: nothing verified
    drafted: Tensor | None  # [B] int64 draft nodes that were verified; None: nothing verified
    logprobs: Tensor | None  # [B, A]
    top_ids: Tensor | None  # [B, A, K]
    top_logprobs: Tensor | None  # [B, A, K]

    def to_host(self) -> StepTensors:
        """Start the copy from a GPU to the host; it is done once the stream gets there.

        The caller waits for an event recorded after this, never for the device.
        """
        return StepTensors(
            emitted=_host_copy(self.emitted),
            path=_optional_copy(self.path),
            sources=_optional_copy(self.sources),
            drafted=_optional_copy(self.drafted),
            logprobs=_optional_copy(self.logprobs),
            top_ids=_optional_copy(self.top_ids),
            top_logprobs=_optional_copy(self.top_logprobs),
        )


@torch.inference_mode()
def extend_step(
    chunks: tuple[Chunk, ...],
    rows: RowTable,
    target: ModelRunner,
    stages: Stages,
    observe: Observe | None = None,
) -> StepTensors | None:
    """Cache prompt chunks; pick the first token of rows whose prompt is complete.

    Returns:
        None if no chunk picks.
    """
    batch = extend_batch(chunks, rows)
    with stages("prefill"):
        out = target.forward(batch)
    rows.commit_extend(batch.rows, batch.prefix_lens + batch.tail_lens)
    resumed = [c.sequence for c in chunks if c.final and not c.picks]
    if resumed:
        ids = torch.tensor([s.row for s in resumed], device=rows.device)
        rows.restore_next(ids, torch.tensor([s.tokens[-1] for s in resumed], device=rows.device))
    picking = [c for c in chunks if c.picks]
    if not picking:
        if observe is not None:
            with stages("observe"):
                observe(extend_commit(chunks, batch, out.aux, None))
        return None
    host_rows = [c.sequence.row for c in picking]
    ids = torch.tensor(host_rows, device=rows.device)
    assert batch.logits_at is not None, "extend_batch says where to pick"
    with stages("pick"):
        picks = pick(
            out.hidden[batch.logits_at],
            target.head,
            PickNodes(
                rows=ids,
                positions=rows.lens[ids],
                num_output=torch.zeros_like(ids),
                path_tokens=ids.new_empty(len(host_rows), 0),
                allowed=None,
                host_rows=host_rows,
            ),
            rows.options,
        )
    rows.commit_first(ids, picks.tokens, host_rows)
    if observe is not None:
        with stages("observe"):
            observe(extend_commit(chunks, batch, out.aux, picks.tokens))
    return StepTensors(
        emitted=picks.tokens.view(-1, 1),
        path=None,
        sources=None,
        drafted=None,
        logprobs=_column(picks.logprobs),
        top_ids=_column(picks.top_ids),
        top_logprobs=_column(picks.top_logprobs),
    )


@torch.inference_mode()
def block_step(
    tree: DraftTree,
    row_ids: Tensor,
    caps: Tensor,
    num_tokens: int,
    num_pages: int,
    host_rows: list[int],
    rows: RowTable,
    target: ModelRunner,
    stages: Stages,
    observe: Observe | None = None,
    walk: Walk = verify,
) -> StepTensors:
    """Verify one tree per row: select, forward, walk, move, commit, observe.

    Args:
        tree: proposals, [B, N].
        row_ids: [B] int64.
        caps: [B] int64, most draft nodes of a row.
        num_tokens: T, roots included; at least B.
        num_pages: most pages that one row holds.
        host_rows: the row ids as the host knows them.
        rows: the row table.
        target: the target network.
        stages: who measures.
        observe: a drafter network that wants to see what became final.
        walk: how far a step goes along its trees.
    """
    with stages("select"):
        chosen = select(tree, row_ids, num_tokens, caps)
        batch = verify_batch(
            tree, chosen, row_ids, rows, q_len=tree.token_ids.shape[1], num_pages=num_pages
        )
    with stages("verify"):
        out = target.forward(batch)
    with stages("walk"):
        verdict = walk(
            tree,
            chosen,
            out.hidden,
            target.head,
            rows.options,
            row_ids,
            batch.prefix_lens,
            host_rows,
        )
    with stages("commit"):
        if tree.token_ids.shape[1] > 1:
            _move_path(verdict.path, batch.prefix_lens, row_ids, rows, target)
        rows.commit_block(row_ids, verdict, host_rows)
    emitted = emitted_tokens(verdict)
    if observe is not None:
        with stages("observe"):
            observe(block_commit(verdict, emitted, batch, row_ids, rows, out.aux))
    return StepTensors(
        emitted=emitted,
        path=verdict.path,
        sources=_sources(tree, chosen, verdict.path),
        drafted=chosen.cu_q.diff() - 1,
        logprobs=verdict.logprobs,
        top_ids=verdict.top_ids,
        top_logprobs=verdict.top_logprobs,
    )


def _sources(tree: DraftTree, chosen: Selection, path: Tensor) -> Tensor:
    """Which drafter proposed the nodes of each path, [B, A] int8; 0 beyond its end."""
    node = chosen.node[chosen.cu_q[:-1].unsqueeze(1) + path.clamp(min=0)]
    return tree.sources.flatten()[node].masked_fill_(path < 0, 0)


def _move_path(
    path: Tensor, lens: Tensor, row_ids: Tensor, rows: RowTable, target: ModelRunner
) -> None:
    """Make each accepted path contiguous in the cache; a chain's path already is."""
    width = path.shape[1]
    step = torch.arange(width, device=path.device)
    moved = (path >= 0) & (path != step)
    if path.is_cpu and not bool(moved.any()):  # reading is free here, and most paths lie well
        return
    owner = row_ids.unsqueeze(1).expand_as(path)
    base = lens.unsqueeze(1)
    src = rows.slots(owner, base + path.clamp(min=0))
    dst = rows.slots(owner, (base + step).expand_as(path))
    nothing = torch.full_like(src, -1)
    target.pool.move(
        torch.where(moved, src, nothing).view(-1), torch.where(moved, dst, nothing).view(-1)
    )


def _optional_copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else _host_copy(x)


def _host_copy(x: Tensor) -> Tensor:
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return pinned.copy_(x, non_blocking=True)


def _column(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.unsqueeze(1)
