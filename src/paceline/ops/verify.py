"""Operators of a verify step's bookkeeping, dispatched on their device; part of `paceline.ops`.

A handful of kernels on a GPU. What they compute is said once, in `ops/reference/tree.py` (`select`) and
`ops/reference/verify.py`: arguments and results are those of the functions of the same name there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.ops.dispatch import implementation

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.tree import DraftTree, Selection, Verdict
    from paceline.ops.reference.verify import Six


def _chosen(op: str, x: Tensor) -> Any:
    """The implementation; whole numbers and copies depend on no dtype."""
    return implementation(op, "cpu" if x.is_cpu else x.device.type, torch.float32)


def select(tree: DraftTree, rows: Tensor, num_tokens: int, caps: Tensor) -> Selection:
    """Choose the T = `num_tokens` nodes of a step: the best of the whole batch, within rows' caps."""
    found: Selection = _chosen("select", tree.scores)(tree, rows, num_tokens, caps)
    return found


def verify_inputs(
    tree: DraftTree,
    selection: Selection,
    rows: Tensor,
    lens: Tensor,
    pages: Tensor,
    *,
    page_size: int,
    dummy_page: int,
    num_pages: int,
) -> Six:
    """Token ids, positions, slots, prefix lengths, tail lengths and pages of a pass over the selected."""
    found: Six = _chosen("verify_inputs", tree.scores)(
        tree,
        selection,
        rows,
        lens,
        pages,
        page_size=page_size,
        dummy_page=dummy_page,
        num_pages=num_pages,
    )
    return found


def draft_inputs(
    rows: Tensor,
    lens: Tensor,
    pages: Tensor,
    *,
    width: int,
    offset: int,
    ahead: int | None,
    tail: int,
    page_size: int,
    dummy_page: int,
    num_pages: int,
) -> Six:
    """Positions, slots, prefix lengths, offsets, tail lengths and pages of a drafter network's pass."""
    found: Six = _chosen("draft_inputs", lens)(
        rows,
        lens,
        pages,
        width=width,
        offset=offset,
        ahead=ahead,
        tail=tail,
        page_size=page_size,
        dummy_page=dummy_page,
        num_pages=num_pages,
    )
    return found


def pick_places(
    tree: DraftTree, selection: Selection, rows: Tensor, lens: Tensor, prompt_lens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Row, position and number of output tokens before it, of the target's pick after each node."""
    op = _chosen("pick_places", tree.scores)
    found: tuple[Tensor, Tensor, Tensor] = op(tree, selection, rows, lens, prompt_lens)
    return found


def judge(
    tree: DraftTree,
    selection: Selection,
    picks: Tensor,
    rows: Tensor,
    lens: Tensor,
    live: Tensor,
    stop_ids: Tensor,
    limits: Tensor,
) -> Verdict:
    """Walk along the target's tokens, and say what follows for each row."""
    op = _chosen("judge", tree.scores)
    found: Verdict = op(tree, selection, picks, rows, lens, live, stop_ids, limits)
    return found


def move_paths(
    caches: tuple[Tensor, Tensor],
    path: Tensor,
    rows: Tensor,
    lens: Tensor,
    pages: Tensor,
    *,
    page_size: int,
    dummy_page: int,
) -> None:
    """Make each accepted path contiguous in the caches, in place."""
    op = _chosen("move_paths", path)
    op(caches, path, rows, lens, pages, page_size=page_size, dummy_page=dummy_page)


def advance(
    tree: DraftTree,
    selection: Selection,
    verdict: Verdict,
    rows: Tensor,
    lens: Tensor,
    next_token: Tensor,
    live: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Advance the rows' state in place; what was emitted, who proposed it, how much was drafted."""
    op = _chosen("advance", tree.scores)
    found: tuple[Tensor, Tensor, Tensor] = op(
        tree, selection, verdict, rows, lens, next_token, live
    )
    return found


def compact(
    verdict: Verdict,
    emitted: Tensor,
    cu_q: Tensor,
    rows: Tensor,
    lens: Tensor,
    pages: Tensor,
    *,
    capacity: int,
    page_size: int,
    dummy_page: int,
) -> Six:
    """The accepted paths, row after row: offsets, tokens, next tokens, positions, slots, nodes."""
    found: Six = _chosen("compact", emitted)(
        verdict,
        emitted,
        cu_q,
        rows,
        lens,
        pages,
        capacity=capacity,
        page_size=page_size,
        dummy_page=dummy_page,
    )
    return found
