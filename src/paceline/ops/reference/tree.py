"""Select and walk: which draft nodes are verified, and how far the target's tokens go along them.

These are the definitions: plain torch, any device, fixed shapes, no read of a device value (on a CPU
a read costs nothing, so there `select` takes a short way when everything fits).

Letters: B rows, N nodes a tree, T selected nodes, A path length, W = ceil(N / 64) mask words.

Worked example, one row: root(0) -> a(1), b(2); a -> c(3); b -> d(4), with scores 0, -1, -2, -5, -2.
`select` with T = 4 keeps 0, 1, 2, 4 (score descending, then index ascending); the mask of d, bits
{0, 2, 4} of the tree, becomes bits {0, 2, 3} of the selected nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.tree import DraftTree, Selection

_WORD = 64
_LOWEST = -3.0e38  # below every finite score, above "not eligible"


def select(tree: DraftTree, rows: Tensor, num_tokens: int, caps: Tensor) -> Selection:
    """Choose the nodes of a step: every row's root, then the best scores over the whole batch.

    Order: score descending, then flat index ascending (a stable sort; `torch.topk` is not, and ties
    would orphan children). A child never scores above its parent and comes after it, so what is
    chosen is closed under parents. With `num_tokens` large enough it is everything.

    Args:
        tree: proposals, N nodes each. NaN scores count as -inf.
        rows: [B] int64 row ids; a negative id marks padding, which has no nodes.
        num_tokens: T, at least one for each row that has nodes.
        caps: [B] int64 most draft nodes (root excluded) of each row; negative: no nodes at all.

    Returns:
        Selection of exactly T entries. Where fewer nodes exist the last ones are dead: `node` -1,
        mask 0, at or beyond `cu_q[B]`; on a CPU they are cut off instead.
    """
    batch, width = tree.token_ids.shape
    caps = torch.where(rows < 0, -1, caps)
    if tree.token_ids.is_cpu and bool((caps >= tree.num_nodes - 1).all()):
        total = int(tree.num_nodes.sum())
        if total <= num_tokens:
            return _everything(tree, total)
    dev = tree.token_ids.device
    index = torch.arange(width, device=dev)
    exists = index < tree.num_nodes.unsqueeze(1)
    key = torch.nan_to_num(tree.scores.to(torch.float32), nan=_LOWEST, neginf=_LOWEST)
    key = torch.where(index == 0, torch.inf, key).masked_fill(~exists, -torch.inf)
    # A row's cap cuts its own order: rank 0 is the root, rank r the r-th best draft node.
    order = torch.sort(key, dim=1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(1, order, index.expand(batch, width))
    exists &= rank <= caps.unsqueeze(1)
    key.masked_fill_(~exists, -torch.inf)

    best = torch.sort(key.view(-1), descending=True, stable=True).indices[:num_tokens]
    chosen = torch.zeros(batch * width, dtype=torch.bool, device=dev)
    chosen.scatter_(0, best, value=True)
    chosen &= exists.view(-1)

    # Compact without asking how many there are: each chosen node's place, everything else to T.
    place = chosen.to(torch.int64).cumsum(0) - 1
    node = torch.full((num_tokens + 1,), -1, dtype=torch.int64, device=dev)
    flat = torch.arange(batch * width, device=dev)
    node.scatter_(0, torch.where(chosen, place, num_tokens), torch.where(chosen, flat, -1))
    node = node[:num_tokens]
    kept = chosen.view(batch, width)
    cu_q = cumulative(kept.sum(1))
    if node.is_cpu:
        node = node[: int(cu_q[-1])]
    return Selection(node=node, cu_q=cu_q, mask=_renumber(tree.mask, kept, node))


def parents_of(tree: DraftTree, selection: Selection) -> Tensor:
    """[T] flat index, among the selected, of each node's parent; -1 for roots and dead entries."""
    batch, width = tree.token_ids.shape
    node, num = selection.node, selection.node.shape[0]
    dev = node.device
    dead = node < 0
    flat = node.clamp(min=0)
    place = torch.full((batch * width + 1,), -1, dtype=torch.int64, device=dev)
    place.scatter_(
        0, torch.where(dead, batch * width, node), torch.arange(num, dtype=torch.int64, device=dev)
    )
    parent = tree.parents.reshape(-1)[flat]
    base = flat - flat % width
    return torch.where(dead | (parent < 0), -1, place[base + parent.clamp(min=0)])


def path_tokens_of(
    tree: DraftTree, selection: Selection, parents: Tensor, num_levels: int
) -> Tensor:
    """Tokens below the root on each node's path, its own included.

    Args:
        tree: the proposals.
        selection: the T nodes.
        parents: [T] int64 from `parents_of`.
        num_levels: A, at least the depth of the deepest selected node plus one.

    Returns:
        [T, A-1] int64, deepest first, -1 padded.
    """
    tokens = tree.token_ids.reshape(-1)[selection.node.clamp(min=0)]
    tokens = torch.where(parents < 0, -1, tokens)
    levels = []
    node = torch.arange(parents.shape[0], device=parents.device)
    for _ in range(num_levels - 1):
        levels.append(torch.where(node < 0, -1, tokens[node]))
        node = torch.where(node < 0, -1, parents[node])
    if not levels:
        return tokens.new_empty(tokens.shape[0], 0)
    return torch.stack(levels, dim=1)


def walk(
    tokens: Tensor,
    parents: Tensor,
    targets: Tensor,
    ends: Tensor,
    roots: Tensor,
    num_levels: int,
) -> Tensor:
    """Follow, from each root, the selected child that carries the target's token.

    Among equal siblings the lowest index is taken. A token below 0 is padding and matches nothing;
    0 is a token like any other.

    Args:
        tokens: [T] int64 token of each selected node.
        parents: [T] int64 flat index of each node's parent among the selected; -1: none.
        targets: [T] int64 the target's token after each node.
        ends: [T] bool: emitting that token ends the row, so no child is entered.
        roots: [B] int64 flat index of each row's root; -1: the row is not live.
        num_levels: A.

    Returns:
        [B, A] int64 flat indices of the accepted nodes, -1 padded.
    """
    num = tokens.shape[0]
    index = torch.arange(num, device=tokens.device)
    above = parents.clamp(min=0)
    match = (parents >= 0) & (tokens >= 0) & (tokens == targets[above]) & ~ends[above]
    # after[t]: the lowest matching child of node t; `num` where there is none.
    after = torch.full((num + 1,), num, dtype=torch.int64, device=tokens.device)
    after.scatter_reduce_(
        0, torch.where(match, parents, num), torch.where(match, index, num), reduce="amin"
    )
    at = torch.where(roots < 0, num, roots)
    path = []
    for _ in range(num_levels):
        path.append(at)
        at = after[at]
    out = torch.stack(path, dim=1)
    return torch.where(out == num, -1, out)


def _everything(tree: DraftTree, total: int) -> Selection:
    """All real nodes: they are each row's first ones, so the tree's bits need no renumbering."""
    batch, width = tree.token_ids.shape
    dev = tree.token_ids.device
    mask = tree.mask.reshape(batch * width, -1)
    node = torch.arange(batch * width, device=dev)
    if total < batch * width:
        index = torch.arange(width, device=dev)
        node = node[(index < tree.num_nodes.unsqueeze(1)).view(-1)]
        mask = mask[node]
    return Selection(node=node, cu_q=cumulative(tree.num_nodes), mask=mask)


def _renumber(mask: Tensor, kept: Tensor, node: Tensor) -> Tensor:
    """Ancestor bits of selected nodes, counted among the kept nodes of their row.

    Args:
        mask: [B, N, W] int64.
        kept: [B, N] bool.
        node: [T] int64 flat, -1 dead.
    """
    batch, width, words = mask.shape
    dev = mask.device
    flat = node.clamp(min=0)
    index = torch.arange(width, device=dev)
    old = mask.reshape(batch * width, words)[flat]  # [T, W]
    bits = (old[:, index // _WORD] >> (index % _WORD)) & 1  # [T, N]
    row = torch.div(flat, width, rounding_mode="floor")
    new = (kept.to(torch.int64).cumsum(1) - 1).clamp(min=0)[row]  # [T, N] place in its row
    bits = torch.where(kept[row] & (node >= 0).unsqueeze(1), bits, 0)
    out = torch.zeros(flat.shape[0], words, dtype=torch.int64, device=dev)
    # Every new place is written by one kept column only, so adding is OR-ing.
    return out.scatter_add_(1, new // _WORD, bits << (new % _WORD))


def cumulative(counts: Tensor) -> Tensor:
    """Offsets of pieces of these sizes: [B] -> [B+1]."""
    out = counts.new_zeros(counts.shape[0] + 1)
    torch.cumsum(counts, 0, out=out[1:])
    return out
