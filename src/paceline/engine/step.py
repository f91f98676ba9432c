"""The two step paths, tensor level: what runs on the device, in the order of the papers.

No host read of a device value happens here: the number of accepted tokens is data, not shape. The
caller (`engine.py`) decides what to compute and later reads the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline import ops
from paceline.core.meanwhile import Meanwhile, nothing
from paceline.engine.buffers import extend_batch, verify_batch
from paceline.engine.commits import block_commit, extend_commit
from paceline.engine.prompt_scores import PromptScores, scores_of
from paceline.engine.step_tensors import StepTensors
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


@torch.inference_mode()
def extend_step(
    chunks: tuple[Chunk, ...],
    rows: RowTable,
    target: ModelRunner,
    stages: Stages,
    observe: Observe | None = None,
    allowed: Tensor | None = None,
    meanwhile: Meanwhile = nothing,
) -> StepTensors | None:
    """Cache prompt chunks; pick the first token of rows whose prompt is complete.

    Args:
        chunks: what to cache.
        rows: the row table.
        target: the target network.
        stages: who measures.
        observe: a drafter network that wants to see what became final.
        allowed: [picking chunks, ceil(V / 32)] int32 grammar bits, or None.
        meanwhile: see `core.meanwhile`.

    Returns:
        None if no chunk picks, and none is scored.
    """
    batch = extend_batch(chunks, rows)
    with stages("prefill"):
        out = target.forward(batch, meanwhile)
    rows.commit_extend(batch.rows, batch.prefix_lens + batch.tail_lens)
    resumed = [c.sequence for c in chunks if c.final and not c.picks]
    if resumed:
        ids = torch.tensor([s.row for s in resumed], device=rows.device)
        rows.restore_next(ids, torch.tensor([s.tokens[-1] for s in resumed], device=rows.device))
    scores = None
    if any(chunk.scores for chunk in chunks):
        with stages("score"):
            scores = scores_of(chunks, out.hidden, target.head)
    picking = [c for c in chunks if c.picks]
    if not picking:
        if observe is not None:
            with stages("observe"):
                observe(extend_commit(chunks, batch, out.aux, None))
        return None if scores is None else _only(scores)
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
        prompts=scores,
    )


def _only(scores: PromptScores) -> StepTensors:
    """What a step leaves that picks nothing."""
    return StepTensors(
        emitted=scores.top_ids.new_empty(0, 1),
        path=None,
        sources=None,
        drafted=None,
        logprobs=None,
        top_ids=None,
        top_logprobs=None,
        prompts=scores,
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
    meanwhile: Meanwhile = nothing,
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
        meanwhile: see `core.meanwhile`.
    """
    with stages("select"):
        chosen = ops.select(tree, row_ids, num_tokens, caps)
        batch = verify_batch(
            tree, chosen, row_ids, rows, q_len=tree.token_ids.shape[1], num_pages=num_pages
        )
    if allowed is not None:
        allowed = allowed[: chosen.node.shape[0]]  # a CPU selects no dead nodes
    with stages("verify"):
        out = target.forward(batch, meanwhile)
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
        tree=tree,
        chosen=chosen,
    )


def _column(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.unsqueeze(1)
