"""The bookkeeping of a verify step around the target's pass: what goes in, what was accepted, what is kept.

These are the definitions: plain torch, any device, fixed shapes, no read of a device value. Which nodes
are verified is `select` (`ops/reference/tree.py`).

Letters: B rows, R row capacity (row R is for padding; a negative row id means it too), N nodes a tree, T
selected nodes, A path length, G pages a row.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from paceline.core.tree import NOT_FINITE, DraftTree, Selection, Verdict
from paceline.ops.reference.kv import move, slots_or_none
from paceline.ops.reference.tree import cumulative, parents_of, walk

Six: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


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
    """What a BLOCK pass over the selected nodes is told.

    Args:
        tree: proposals, [B, N].
        selection: the T nodes.
        rows: [B] int64.
        lens: [R+1] int64 cached tokens of every row.
        pages: [R+1, G] int32 page ids of every row.
        page_size: tokens a page.
        dummy_page: page id of places that have none.
        num_pages: columns of the page table that the pass needs.

    Returns:
        token_ids [T], positions [T], slots [T] (-1: writes nothing), prefix_lens [B], tail_lens [B], all
        int64, and the rows' pages [B, num_pages] int32. Dead entries have token 0, position 0, slot -1.
    """
    width = tree.token_ids.shape[1]
    node = selection.node
    prefix_lens, table = lens[rows], pages[rows, :num_pages]
    whole = node.is_cpu and node.shape == rows.shape
    if width == 1 and whole and int(selection.cu_q[-1]) == rows.shape[0]:
        # Plain decoding, one root a row; reading is free here.
        slots = slots_or_none(pages, rows, prefix_lens, page_size, dummy_page)
        tails = torch.ones_like(prefix_lens)
        return tree.token_ids.view(-1), prefix_lens, slots, prefix_lens, tails, table
    dead = node < 0
    flat = node.clamp(min=0)
    owner = torch.div(flat, width, rounding_mode="floor")
    base = prefix_lens[owner]
    step = torch.arange(node.shape[0], device=node.device)
    places = (base + step - selection.cu_q[owner]).masked_fill(dead, 0)
    slots = slots_or_none(pages, rows[owner], places, page_size, dummy_page)
    return (
        tree.token_ids.reshape(-1)[flat].masked_fill(dead, 0),
        (base + tree.depths.reshape(-1)[flat]).masked_fill(dead, 0),
        slots.masked_fill(dead, -1),
        prefix_lens,
        selection.cu_q.diff(),
        table,
    )


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
    """What a drafter network's BLOCK pass of q = `width` queries a row is told.

    Args:
        rows: [B] int64.
        lens: [R+1] int64 cached tokens of every row.
        pages: [R+1, G] int32 page ids of every row.
        width: q.
        offset: the queries lie at the q places from lens + offset on; where that is none, from 0.
        ahead: all are at position lens + ahead; None: each is at its place.
        tail: keys of a row that a mask speaks of, the queries last; what lies before them is prefix.
        page_size: tokens a page.
        dummy_page: page id of places that have none.
        num_pages: columns of the page table that the pass needs.

    Returns:
        positions [B * q], slots [B * q], prefix_lens [B], cu_q [B+1], tail_lens [B], all int64; the rows'
        pages [B, num_pages] int32.
    """
    batch, device = rows.shape[0], rows.device
    base = lens[rows].unsqueeze(1)
    places = (base + offset).clamp(min=0) + torch.arange(width, device=device)
    positions = places if ahead is None else (base + ahead).expand(-1, width)
    slots = slots_or_none(pages, rows.unsqueeze(1), places, page_size, dummy_page)
    prefix_lens = places[:, -1] + 1 - tail
    return (
        positions.reshape(-1),
        slots.view(-1),
        prefix_lens,
        torch.arange(batch + 1, device=device) * width,
        torch.full_like(prefix_lens, tail),
        pages[rows, :num_pages],
    )


def pick_places(
    tree: DraftTree, selection: Selection, rows: Tensor, lens: Tensor, prompt_lens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the target picks after each selected node.

    Args:
        tree: proposals, [B, N].
        selection: the T nodes.
        rows: [B] int64.
        lens: [B] int64 tokens cached before this step.
        prompt_lens: [R+1] int64 of every row.

    Returns:
        [T] int64 each: the row (R for dead entries), the position of the token to be emitted, and how many
        tokens the row will have emitted before it. Dead entries' numbers mean nothing.
    """
    dead = selection.node < 0
    flat = selection.node.clamp(min=0)
    owner = torch.div(flat, tree.token_ids.shape[1], rounding_mode="floor")
    owners = torch.where(dead, prompt_lens.shape[0] - 1, rows[owner])
    position = lens[owner] + tree.depths.reshape(-1)[flat] + 1
    return owners, position, position - prompt_lens[owners]


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
    """Walk along the target's tokens, and say what follows for each row.

    Args:
        tree: proposals, [B, N].
        selection: the T nodes.
        picks: [T] int64 the target's token after each; NOT_FINITE: none can be chosen.
        rows: [B] int64.
        lens: [B] int64 tokens cached before this step.
        live: [R+1] bool.
        stop_ids: [R+1, 16] int64, -1 padded.
        limits: [R+1] int64 most known tokens of a row.

    Returns:
        The verdict, without log-probabilities; A is N.
    """
    width = tree.token_ids.shape[1]
    dead = selection.node < 0
    flat = selection.node.clamp(min=0)
    owner = torch.div(flat, width, rounding_mode="floor")
    owners = torch.where(dead, live.shape[0] - 1, rows[owner])
    known = lens[owner] + tree.depths.reshape(-1)[flat] + 2
    ends = (stop_ids[owners] == picks.unsqueeze(1)).any(dim=1)
    ends |= (known >= limits[owners]) | (picks == NOT_FINITE)
    tokens = tree.token_ids.reshape(-1)[flat]
    first, past = selection.cu_q[:-1], selection.cu_q[1:]
    roots = torch.where(live[rows] & (past > first), first, -1)
    path = walk(tokens, parents_of(tree, selection), picks, ends, roots, width)
    on_path = path >= 0
    count = on_path.sum(1)
    moved = count > 0
    at = path.clamp(min=0)
    last = at.gather(1, (count - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return Verdict(
        path=torch.where(on_path, path - first.unsqueeze(1), -1),
        path_tokens=torch.where(on_path, tokens[at], -1),
        count=count,
        next_token=torch.where(moved, picks[last], tree.token_ids[:, 0]),
        alive=moved & ~ends[last],
    )


def move_paths(
    caches: tuple[Tensor, ...],
    path: Tensor,
    rows: Tensor,
    lens: Tensor,
    pages: Tensor,
    *,
    page_size: int,
    dummy_page: int,
) -> None:
    """Make each accepted path contiguous in the caches; a chain's path already is.

    Args:
        caches: each [L, Hkv, S, D]; the last slot is a dummy.
        path: [B, A] int64 accepted nodes as selected indices within the row, rising, -1 padded. Node i
            lies at place lens + i; the path's j-th comes to lie at place lens + j.
        rows: [B] int64.
        lens: [B] int64 tokens cached before this step.
        pages: [R+1, G] int32 page ids of every row.
        page_size: tokens a page.
        dummy_page: page id of places that have none; nothing moves from or to them.
    """
    step = torch.arange(path.shape[1], device=path.device)
    moved = (path >= 0) & (path != step)
    if path.is_cpu and not bool(moved.any()):  # reading is free here, and most paths lie well
        return
    owner, base = rows.unsqueeze(1).expand_as(path), lens.unsqueeze(1)
    places = base + path.clamp(min=0), (base + step).expand_as(path)
    src, dst = (slots_or_none(pages, owner, at, page_size, dummy_page) for at in places)
    src, dst = (torch.where(moved, slots, -1).view(-1) for slots in (src, dst))
    move(caches, src, dst)


def advance(
    tree: DraftTree,
    selection: Selection,
    verdict: Verdict,
    rows: Tensor,
    lens: Tensor,
    next_token: Tensor,
    live: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Advance the rows by their accepted paths, in place; dead rows (count 0) stay as they are.

    Args:
        tree: proposals, [B, N].
        selection: the T nodes.
        verdict: the walk's outcome.
        rows: [B] int64.
        lens: [R+1] int64 cached tokens of every row.
        next_token: [R+1] int64 picked but uncached token of every row.
        live: [R+1] bool.

    Returns:
        emitted [B, A] int64, see `emitted_tokens`; sources [B, A] int8, which drafter proposed the path's
        nodes, 0 beyond its end; drafted [B] int64, draft nodes that were verified.
    """
    lens[rows] += verdict.count
    # Steps in flight still embed a dead row's next token: it must be one.
    after = verdict.next_token.clamp(min=0)
    next_token[rows] = torch.where(verdict.count > 0, after, next_token[rows])
    live[rows] = verdict.alive
    at = selection.cu_q[:-1].unsqueeze(1) + verdict.path.clamp(min=0)
    # A row without nodes may begin past the last one.
    node = selection.node[at.clamp(max=selection.node.shape[0] - 1)]
    sources = tree.sources.flatten()[node].masked_fill(verdict.path < 0, 0)
    return emitted_tokens(verdict), sources, selection.cu_q.diff() - 1


def emitted_tokens(verdict: Verdict) -> Tensor:
    """[B, A] tokens that a step emits: path without its root, then `next_token`; -1 padded.

    A row that ends because of its logits has NOT_FINITE in place of the last one.
    """
    path = verdict.path_tokens
    rows, width = path.shape
    emitted = torch.full((rows, width), -1, dtype=torch.int64, device=path.device)
    emitted[:, :-1] = path[:, 1:]
    last = (verdict.count - 1).clamp(min=0).unsqueeze(1)
    keep = emitted.gather(1, last)
    value = torch.where(verdict.count.unsqueeze(1) > 0, verdict.next_token.unsqueeze(1), keep)
    return emitted.scatter(1, last, value)


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
    """The accepted paths, row after row.

    Args:
        verdict: the walk's outcome.
        emitted: [B, A] int64 the token after each path node, -1 padded.
        cu_q: [B+1] int64 where each row's selected nodes begin.
        rows: [B] int64.
        lens: [B] int64 tokens cached before this step.
        pages: [R+1, G] int32 page ids of every row.
        capacity: T.
        page_size: tokens a page.
        dummy_page: page id of places that have none.

    Returns:
        cu [B+1], where each row's path begins; token_ids, next_ids, positions, slots and the selected node
        [T] each, all int64. What lies past cu[B] is dead: 0 everywhere, slot -1; on a CPU it is cut off,
        unless nothing else is left.
    """
    if cu_q.is_cpu:  # reading is free here, and what is dead would be computed
        at = (verdict.path.view(-1) >= 0).nonzero().squeeze(1)
        if at.shape[0] > 0:
            row = torch.div(at, verdict.path.shape[1], rounding_mode="floor")
            places = lens[row] + at % verdict.path.shape[1]
            return (
                cumulative(verdict.count),
                verdict.path_tokens.view(-1)[at],
                emitted.view(-1)[at].clamp(min=0),
                places,
                slots_or_none(pages, rows[row], places, page_size, dummy_page),
                cu_q[row] + verdict.path.view(-1)[at],
            )
    step = torch.arange(verdict.path.shape[1], device=verdict.path.device)
    accepted = step < verdict.count.unsqueeze(1)  # [B, A]
    cu = cumulative(verdict.count)
    # Accepted nodes go to their place, all others to a place past the end that is cut off.
    place = torch.where(accepted, cu[:-1].unsqueeze(1) + step, capacity).view(-1)
    dead = torch.arange(capacity, device=cu.device) >= cu[-1]

    def packed(values: Tensor, fill: int) -> Tensor:
        out = values.new_full((capacity + 1,), fill)
        return out.scatter_(0, place, values.reshape(-1))[:capacity].masked_fill(dead, fill)

    positions = lens.unsqueeze(1) + step
    owner = rows.unsqueeze(1).expand_as(positions)
    # Past the path's end a place may lie past the row's last page.
    slots = slots_or_none(pages, owner, positions.masked_fill(~accepted, 0), page_size, dummy_page)
    source = cu_q[:-1].unsqueeze(1) + verdict.path.clamp(min=0)
    return (
        cu,
        packed(verdict.path_tokens, 0),
        packed(emitted.clamp(min=0), 0),
        packed(positions, 0),
        packed(slots, -1),
        packed(source, 0),
    )
