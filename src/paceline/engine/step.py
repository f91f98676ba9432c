"""The two step paths, tensor level: what runs on the device, in the order of the papers.

No host read of a device value happens here: the number of accepted tokens is data, not shape. The
caller (`engine.py`) decides what to compute and later reads the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline import ops
from paceline.engine.buffers import extend_batch, verify_batch
from paceline.engine.commits import block_commit, extend_commit
from paceline.sample.sampler import Head, PickNodes, pick
from paceline.sample.verifier import verify

if TYPE_CHECKING:
    from paceline.core.request import Grammar
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
        allowed: Tensor | None = None,
        grammars: Sequence[Grammar | None] = (),
        /,
    ) -> Verdict:
        """Return the verdict of every row."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """What a step leaves on the device for the host to read. K top logprobs.

    EXTEND: one emitted token for each picking chunk, A = 1, B = picking chunks. `whole` is set where the
    whole numbers lie side by side, so that one copy brings them to the host.
    """

    emitted: Tensor  # [B, A] int64, -1 padded; NOT_FINITE after the last token of a failed row
    path: Tensor | None  # [B, A] int64 accepted nodes as selected indices; None for EXTEND
    sources: Tensor | None  # [B, A] which drafter proposed them; None: nothing verified
    drafted: Tensor | None  # [B] int64 draft nodes that were verified; None: nothing verified
    logprobs: Tensor | None  # [B, A]
    top_ids: Tensor | None  # [B, A, K]
    top_logprobs: Tensor | None  # [B, A, K]
    whole: Tensor | None = None  # [B, 3 * A + 1] int64: emitted, path, sources, drafted

    def joined(self) -> StepTensors:
        """The same with `whole` set: one tensor that the others are views of."""
        assert self.path is not None, "a block step walks"
        assert self.sources is not None, "a block step walks"
        assert self.drafted is not None, "a block step verifies"
        sources = self.sources.to(torch.int64)
        parts = (self.emitted, self.path, sources, self.drafted.unsqueeze(1))
        return self._with_whole(torch.cat(parts, dim=1))

    def _with_whole(self, whole: Tensor) -> StepTensors:
        width = whole.shape[1] // 3
        return replace(
            self,
            emitted=whole[:, :width],
            path=whole[:, width : 2 * width],
            sources=whole[:, 2 * width : 3 * width],
            drafted=whole[:, -1],
            whole=whole,
        )

    def first(self, count: int) -> StepTensors:
        """The results of the first `count` rows; `joined` before."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:count]

        assert self.whole is not None, "joined first"
        kept = replace(
            self,
            logprobs=cut(self.logprobs),
            top_ids=cut(self.top_ids),
            top_logprobs=cut(self.top_logprobs),
        )
        return kept._with_whole(self.whole[:count])  # noqa: SLF001 (a step's of this class)

    def to_host(self) -> StepTensors:
        """Start the copy from a GPU to the host; it is done once the stream gets there.

        The caller waits for an event recorded after this, never for the device.
        """
        if self.whole is not None:
            copied = replace(
                self,
                logprobs=_optional_copy(self.logprobs),
                top_ids=_optional_copy(self.top_ids),
                top_logprobs=_optional_copy(self.top_logprobs),
            )
            return copied._with_whole(_host_copy(self.whole))  # noqa: SLF001 (of this class)
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
    allowed: Tensor | None = None,
) -> StepTensors | None:
    """Cache prompt chunks; pick the first token of rows whose prompt is complete.

    Args:
        chunks: what to cache.
        rows: the row table.
        target: the target network.
        stages: who measures.
        observe: a drafter network that wants to see what became final.
        allowed: [picking chunks, ceil(V / 32)] int32 grammar bits, or None.

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
                allowed=allowed,
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
    allowed: Tensor | None = None,
    grammars: Sequence[Grammar | None] = (),
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
        allowed: [T, ceil(V / 32)] int32 grammar bits of each selected node, or None. All real nodes are
            selected then, in the trees' order, since the host cannot know another.
        grammars: instead, the rows' grammars themselves, for a walk on a CPU.
    """
    with stages("select"):
        chosen = ops.select(tree, row_ids, num_tokens, caps)
        batch = verify_batch(
            tree, chosen, row_ids, rows, q_len=tree.token_ids.shape[1], num_pages=num_pages
        )
    if allowed is not None:
        allowed = allowed[: chosen.node.shape[0]]  # a CPU selects no dead nodes
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
            allowed,
            grammars,
        )
    with stages("commit"):
        if tree.token_ids.shape[1] > 1:
            lens, pages = batch.prefix_lens, rows.pages.tensor
            target.pool.move_paths(verdict.path, row_ids, lens, pages)
        done = rows.commit_block(tree, chosen, row_ids, verdict, host_rows)
    if observe is not None:
        with stages("observe"):
            observe(block_commit(verdict, done.emitted, batch, row_ids, rows, out.aux))
    return StepTensors(
        emitted=done.emitted,
        path=verdict.path,
        sources=done.sources,
        drafted=done.drafted,
        logprobs=verdict.logprobs,
        top_ids=verdict.top_ids,
        top_logprobs=verdict.top_logprobs,
    )


def _optional_copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else _host_copy(x)


def _host_copy(x: Tensor) -> Tensor:
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return pinned.copy_(x, non_blocking=True)


def _column(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.unsqueeze(1)
