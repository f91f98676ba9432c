"""Attention in plain PyTorch such that a query's bits depend on its own keys, in path order, alone.

A query's keys are one list: its prefix, then the tail nodes that it sees. The list is cut at multiples
of 64 list indices. In a tree a key's index is its depth, the same as when its ancestors have become
prefix, so decode, chain, tree and prefill cut alike. Each (query, tile, key/value head) is a unit of
work, and units go through the same calls of a fixed shape, 64 at a time: what else is computed changes
neither the kernels nor the order of any sum. Keys that a query does not see are never read into a
product, and an unfilled place adds exact zeros.

That a library treats all units of a call alike is measured once (`refusal`).

Letters: T tokens, U units of a call, Hq/Hkv heads, g query heads of a key/value head, D head size,
S slots, L length of the longest list.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, get_num_threads
from torch.nn import functional

from paceline.ops.cpu.rows import vanishing
from paceline.ops.reference import fused as reference

TILE = 64  # keys
UNITS = 64  # of a call
GROUP = 8  # query heads of a unit; more are further units
_WIDTHS = (64, 97, 1000, 4096)  # of rows that a measurement looks at


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The tiles of some queries; the same for all heads and, for equal visibility, all layers."""

    queries: Tensor  # [n] int64 flat index of each query
    slots: Tensor  # [m, 64] int64 slots of each tile's keys; -1: none, or hidden
    owner: Tensor  # [m] int64 whose tile it is: index into `queries`
    rank: Tensor  # [m] int64 the how-manieth of its query it is; ascending


def work_of(queries: Tensor, slots: Tensor, listed: Tensor, sees: Tensor) -> Work:
    """Cut the key lists of some queries of one row.

    Args:
        queries: [q] int64 flat indices.
        slots: [K] int64 slots of the row's places.
        listed: [q, K] bool which places stand in a query's list.
        sees: [q, K] bool which of those it attends to: a window hides the rest.
    """
    lengths = listed.sum(1)
    tiles = torch.div(lengths + TILE - 1, TILE, rounding_mode="floor")
    most = max(int(tiles.max()), 1)
    index = torch.where(listed, listed.cumsum(1) - 1, most * TILE)
    lists = torch.full((queries.shape[0], most * TILE + 1), -1, dtype=torch.int64)
    lists.scatter_(1, index, torch.where(sees, slots, -1))
    exists = torch.arange(most)[:, None] < tiles  # [tiles, q]
    rank, owner = exists.nonzero(as_tuple=True)
    cut = lists[:, :-1].view(queries.shape[0], most, TILE)
    return Work(queries=queries, slots=cut[owner, rank], owner=owner, rank=rank)


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, work: Work, scale: float) -> Tensor:
    """Softmax attention of some queries.

    Args:
        q: [T, Hq, D] of the pass.
        k_cache: [Hkv, S, D] of a layer.
        v_cache: [Hkv, S, D].
        work: which queries, and their keys.
        scale: of the scores.

    Returns:
        [q, Hq, D] float32 of the work's queries; zeros for one that sees nothing.
    """
    kv_heads, _, dim = k_cache.shape
    count, num_heads = work.queries.shape[0], q.shape[1]
    group = num_heads // kv_heads
    blocks = -(-group // GROUP)
    mine = q[work.queries].float() * scale
    mine = functional.pad(mine.view(count, kv_heads, group, dim), (0, 0, 0, blocks * GROUP - group))
    mine = mine.view(count, kv_heads * blocks, GROUP, dim)
    heads = kv_heads * blocks
    # Units in the order of tiles, so that tile t of all queries is a run of them.
    unit = torch.arange(work.owner.shape[0] * heads)
    tile, head = unit // heads, unit % heads
    owner = work.owner[tile]
    calls = [
        (owner[i : i + UNITS], tile[i : i + UNITS], head[i : i + UNITS]) for i in _starts(unit)
    ]

    scores = torch.cat([_scores(mine, k_cache, work, *call, blocks) for call in calls])
    best = torch.full((count * heads, GROUP), -torch.inf)
    place = (owner * heads + head)[:, None].expand(-1, GROUP)
    best.scatter_reduce_(0, place, scores.amax(-1), reduce="amax")

    total, out = torch.zeros(count * heads, GROUP), torch.zeros(count * heads, GROUP, dim)
    parts = [
        _weigh(scores[i : i + UNITS], best, v_cache, work, *call, blocks, heads)
        for i, call in zip(_starts(unit), calls, strict=True)
    ]
    sums, values = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    rank = work.rank[tile]
    for run in torch.split(unit, torch.bincount(rank).tolist()):  # a query has one tile in each run
        at = place[run, 0]
        total[at] += sums[run]
        out[at] += values[run]
    out = out / total.masked_fill(best == -torch.inf, 1).unsqueeze(-1)
    return out.view(count, kv_heads, blocks * GROUP, dim)[:, :, :group].flatten(1, 2)


def _starts(unit: Tensor) -> range:
    return range(0, unit.shape[0], UNITS)


def _gather(cache: Tensor, slots: Tensor, heads: Tensor) -> Tensor:
    """Entries [U, 64, D] float32 at slots [U, 64] of heads [U]; zeros where the slot is -1."""
    _, num_slots, dim = cache.shape
    at = (heads[:, None] * num_slots + slots.clamp(min=0)).view(-1)
    found = cache.reshape(-1, dim).index_select(0, at).float()
    none = (slots.view(-1) < 0).nonzero().squeeze(1)
    return found.index_fill_(0, none, 0).view(*slots.shape, dim)


def _full(part: Tensor) -> Tensor:
    """More zero units, up to the number of a call."""
    missing = UNITS - part.shape[0]
    return functional.pad(part, (0, 0) * (part.ndim - 1) + (0, missing)) if missing else part


def _scores(
    q: Tensor, k_cache: Tensor, work: Work, owner: Tensor, tile: Tensor, head: Tensor, blocks: int
) -> Tensor:
    """Scores [u, 8, 64] of up to 64 units; -inf where there is no key."""
    slots = work.slots[tile]
    keys = _gather(k_cache, slots, head // blocks)
    found = torch.bmm(_full(q[owner, head]), _full(keys).transpose(1, 2))[: owner.shape[0]]
    return found.masked_fill_((slots < 0).unsqueeze(1), -torch.inf)


def _weigh(
    scores: Tensor,
    best: Tensor,
    v_cache: Tensor,
    work: Work,
    owner: Tensor,
    tile: Tensor,
    head: Tensor,
    blocks: int,
    heads: int,
) -> tuple[Tensor, Tensor]:
    """Sums [u, 8] of the weights of up to 64 units, and weighted values [u, 8, D]."""
    top = best[owner * heads + head].unsqueeze(-1)
    shifted = (scores - top).masked_fill_(scores == -torch.inf, -torch.inf)  # -inf - -inf is NaN
    weights = _full(shifted).exp()
    values = _full(_gather(v_cache, work.slots[tile], head // blocks))
    sums, out = weights.sum(-1), torch.bmm(weights, values)
    return sums[: owner.shape[0]], out[: owner.shape[0]]


def refusal(width: int) -> str | None:
    """Why rows would not be independent of their company with PyTorch here, as a clause; None: they are.

    Args:
        width: head size.
    """
    return _measured(width, get_num_threads())


@functools.cache
def _measured(width: int, threads: int) -> str | None:
    del threads  # the caller's setting is in force
    query, keys = vanishing(width, TILE, torch.float32)
    weights, values = vanishing(TILE, width, torch.float32)
    many = (UNITS, GROUP, 1)
    scores = torch.bmm(query.expand(UNITS, GROUP, width).contiguous(), keys.T.repeat(UNITS, 1, 1))
    out = torch.bmm(weights.repeat(*many), values.T.repeat(UNITS, 1, 1))
    spread = torch.randn(TILE, generator=torch.Generator().manual_seed(1)).repeat(*many)
    for name, found in (
        ("product", scores),
        ("product", out),
        ("exponential", spread.exp()),
        ("sum", spread.sum(-1)),
    ):
        if not bool((found == found[:1, :1]).all()):
            return f"PyTorch's batched {name} rounds differently from place to place here"
    for size in _WIDTHS:
        row = torch.randn(1, size, generator=torch.Generator().manual_seed(size))
        for count in (2, 33):
            several = row.repeat(count, 1)
            norm = reference.rms_norm(several, row[0], 1e-6) == reference.rms_norm(
                row, row[0], 1e-6
            )
            if not bool(norm.all()):
                return "PyTorch's norm rounds a row differently in company here"
            if size % 2 == 0 and not bool(
                (reference.silu_mul(several) == reference.silu_mul(row)).all()
            ):
                return "PyTorch's activation rounds a row differently in company here"
    return None
