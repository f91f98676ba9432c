"""verify: how far the target's own tokens go along each row's draft tree.

One rule for chains, trees and no draft at all. The target's token at a node depends on the node's
path, position and the request's seed only, never on the tree; the walk then follows the child that
carries it. So the emitted tokens are those of autoregressive decoding with that seed, whichever
drafter ran, at any temperature and with any option (drafter-invariant decoding, arXiv 2408.07978).
The tree decides only how many are emitted in a step.

A node at depth d of a row with `lens` cached tokens emits at position lens + d + 1, as the row's
(lens + 1 + d - prompt_len)-th output token counted from 0; lens + d + 2 tokens are known with it.

Letters: B rows, N nodes a tree, T selected nodes, A path length, H hidden size, K top logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline import ops
from paceline.core.tree import DraftTree, Selection, Verdict
from paceline.ops.reference.tree import parents_of, path_tokens_of
from paceline.sample import options as opt
from paceline.sample.hostwalk import verify_host
from paceline.sample.sampler import Head, PickNodes, pick_on_device

if TYPE_CHECKING:
    from paceline.core.request import Grammar
    from paceline.sample.options import SamplingTable


def verify(
    tree: DraftTree,
    selection: Selection,
    hidden: Tensor,
    head: Head,
    table: SamplingTable,
    rows: Tensor,
    lens: Tensor,
    host_rows: Sequence[int],
    allowed: Tensor | None = None,
    grammars: Sequence[Grammar | None] = (),
) -> Verdict:
    """Pick at every selected node and walk.

    On a CPU the walk goes first and picks only at the nodes it reaches (`hostwalk`): the same
    verdict for as many picks as tokens are emitted.

    Args:
        tree: proposals, [B, N].
        selection: the T verified nodes.
        hidden: [T, H] their final hidden states.
        head: hidden -> logits.
        table: sampling options.
        rows: [B] int64 row ids.
        lens: [B] int64 tokens cached before this step.
        host_rows: the distinct rows, as the host knows them.
        allowed: [T, ceil(V / 32)] int32 grammar bits for each node, or None.
        grammars: the rows' grammars, each where its root stands; empty: none, or `allowed` says it. Only
            on a CPU, where the walk takes them along its path and back.

    Returns:
        The verdict. A row that is not live, or has no selected node, gets count 0, alive False and
        its root as `next_token`.
    """
    if hidden.is_cpu:
        return verify_host(tree, selection, hidden, head, table, rows, lens, allowed, grammars)
    assert not grammars, "a device is told what is allowed before the step"
    return verify_device(tree, selection, hidden, head, table, rows, lens, host_rows, allowed)


def verify_device(
    tree: DraftTree,
    selection: Selection,
    hidden: Tensor,
    head: Head,
    table: SamplingTable,
    rows: Tensor,
    lens: Tensor,
    host_rows: Sequence[int],
    allowed: Tensor | None = None,
) -> Verdict:
    """`verify` as device operations only, fixed shapes, no read of a device value; A is N."""
    owners, positions, outputs = ops.pick_places(tree, selection, rows, lens, table.prompt_lens)
    picks = pick_on_device(
        hidden,
        head,
        PickNodes(
            rows=owners,
            positions=positions,
            num_output=outputs,
            path_tokens=_paths(tree, selection, table.in_play(host_rows)),
            allowed=allowed,
            host_rows=host_rows,
        ),
        table,
    )
    verdict = ops.judge(
        tree, selection, picks.tokens, rows, lens, table.live, table.stop_ids, table.limits
    )
    if picks.logprobs is None:
        return verdict
    on_path = verdict.path >= 0
    at = selection.cu_q[:-1].unsqueeze(1) + verdict.path.clamp(min=0)
    at = at.clamp(max=max(0, selection.node.shape[0] - 1))  # a row without nodes may begin past all
    return replace(
        verdict,
        logprobs=_along(picks.logprobs, at, on_path, torch.nan),
        top_ids=_along(picks.top_ids, at, on_path, -1),
        top_logprobs=_along(picks.top_logprobs, at, on_path, torch.nan),
    )


def _paths(tree: DraftTree, selection: Selection, flags: int) -> Tensor:
    """Tokens below the root on each selected node's path, for penalties; nobody else needs them."""
    if not flags & opt.PENALTY:
        return tree.token_ids.new_empty(selection.node.shape[0], 0)
    parents = parents_of(tree, selection)
    return path_tokens_of(tree, selection, parents, tree.token_ids.shape[1])


def _along(values: Tensor | None, at: Tensor, on_path: Tensor, fill: float) -> Tensor | None:
    """Gather values [T, ...] at the path's nodes [B, A] -> [B, A, ...], `fill` past its end."""
    if values is None:
        return None
    keep = on_path.view(*on_path.shape, *([1] * (values.ndim - 1)))
    return torch.where(keep, values[at], fill)
