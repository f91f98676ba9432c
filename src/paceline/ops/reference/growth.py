"""Best-first growth of draft trees over a block's candidates: the definition.

Level by level: of depth d at most `budget` prefixes can be among the best, and each extends one of those of
depth d - 1. Off the spine, the i-th best prefix of a depth, extended by the r-th candidate, has at least
(i + 1)(r + 1) - 1 others before it, so only pairs within the budget are looked at. All rows at once, a fixed
number of tensor operations, no work per node. What the tree is, and who decides between equals, is said in
`draft/ddtree.py`.

`best_nodes` is what tree drafters have in common: the best of many scored prefixes, as a tree. Since no
prefix scores above the one that it extends, and ties go to the one that was looked at first, those are
closed under parents and already stand in an order in which parents come first.

Letters: B rows, P positions, C candidates, M prefixes (the root's included), N nodes, n longest prefix or
pairs, W mask words.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.core.tree import NEG_INF, DraftTree, num_words

_WORD = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """Prefixes of one length, best first; n of them. The root is the prefix of length 0."""

    tokens: Tensor  # [B, n] int64, the last of each prefix
    scores: Tensor  # [B, n] log survival
    paths: Tensor  # [B, n, length + 1] place among all levels' prefixes of each prefix of it


def best_first(
    roots: Tensor, ids: Tensor, on: Tensor, off: Tensor, budget: int, width: int, source: int
) -> DraftTree:
    """The `budget` best prefixes of every row, as a tree.

    Args:
        roots: [B] int64 newest tokens.
        ids: [B, P, C] int64 candidates per position, best first.
        on: [B, P, C] their log survivals after the spine.
        off: [B, P, C] after any other path.
        budget: nodes besides the root.
        width: most candidates of a position that are looked at.
        source: which drafter proposes them.

    Returns:
        N = 1 + budget nodes, or 1 + all prefixes if those are fewer. A prefix that cannot survive
        (-inf or NaN) is padding.
    """
    levels = _levels(roots, ids, sane(on), sane(off), budget, min(width, ids.shape[2]))
    longest, total = ids.shape[1] + 1, sum(level.scores.shape[1] for level in levels)
    lacking = [(longest - level.paths.shape[2], 0) for level in levels]
    return best_nodes(
        torch.cat([level.tokens for level in levels], dim=1),
        torch.cat([level.scores for level in levels], dim=1),
        torch.cat(
            [pad(v.paths, short, value=total) for v, short in zip(levels, lacking, strict=True)],
            dim=1,
        ),
        budget,
        source,
    )


def num_nodes(positions: int, width: int, budget: int) -> int:
    """N of `best_first`'s trees: the root and `budget` prefixes, or all if those are fewer."""
    prefixes, level = 0, 1
    for _ in range(positions):
        level = min(level * width, budget)
        prefixes += level
        if prefixes >= budget:
            return 1 + budget
    return 1 + prefixes


def sane(weights: Tensor) -> Tensor:
    """Log survivals of at most 0 in float64, in which sums of all builders are the same."""
    return weights.double().nan_to_num(nan=NEG_INF, neginf=NEG_INF).clamp(max=0.0)


def _levels(
    roots: Tensor, ids: Tensor, on: Tensor, off: Tensor, budget: int, width: int
) -> list[_Level]:
    """The root; then for each position the spine's prefix, and the best others that end there."""
    rows, positions, _ = on.shape
    device = roots.device
    place = torch.zeros(rows, 1, 1, dtype=torch.int64, device=device)
    spine = _Level(tokens=roots.view(-1, 1), scores=on.new_zeros(rows, 1), paths=place)
    others = _Level(tokens=place[:, :0, 0], scores=on.new_zeros(rows, 0), paths=place[:, :0])
    levels, first = [spine], 1  # `first`: place of the level's first prefix
    for position in range(positions):
        parents, ranks = pairs(others.scores.shape[1], width, budget, device)
        # Children of the spine, then of the others, in the order that decides between equals.
        beside = torch.arange(1, min(width, budget + 1), device=device)
        scores = torch.cat(
            (
                spine.scores + on[:, position, beside],
                others.scores[:, parents] + off[:, position, ranks],
            ),
            dim=1,
        )
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        scores, order = scores[:, :budget], order[:, :budget]
        above = torch.cat((spine.paths, others.paths), dim=1)
        parents = torch.cat((torch.zeros_like(beside), parents + 1))[order]
        ranks = torch.cat((beside, ranks))[order]
        size = order.shape[1]
        own = torch.arange(first, first + size + 1, device=device).expand(rows, -1).unsqueeze(2)
        spine = _Level(
            tokens=ids[:, position, :1],
            scores=spine.scores + on[:, position, :1],
            paths=torch.cat((spine.paths, own[:, :1]), dim=2),
        )
        others = _Level(
            tokens=ids[:, position].gather(1, ranks),
            scores=scores,
            paths=torch.cat(
                (
                    above.gather(1, parents.unsqueeze(2).expand(-1, -1, position + 1)),
                    own[:, 1:],
                ),
                dim=2,
            ),
        )
        levels += [spine, others]
        first += size + 1
    return levels


@functools.lru_cache(maxsize=64)
def pairs(known: int, count: int, budget: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which (prefix, candidate) pairs can be among the best `budget`: two lists [n]."""
    both = [(i, r) for i in range(known) for r in range(count) if (i + 1) * (r + 1) <= budget]
    found = torch.tensor(both, dtype=torch.int64, device=device).view(-1, 2)
    return found[:, 0], found[:, 1]


def best_nodes(
    tokens: Tensor, scores: Tensor, paths: Tensor, count: int, source: int | Tensor
) -> DraftTree:
    """The root and the `count` best prefixes of every row.

    Args:
        tokens: [B, M] int64, the last of each prefix; the root first.
        scores: [B, M] log survivals; 0 at the root, none above what it extends.
        paths: [B, M, n] places, among the M, of each prefix of it, itself last, the root included;
            filled up with M at the front.
        count: nodes besides the root.
        source: which drafter proposes them, or [B, M] int8 which drafter proposes each.

    Returns:
        N = 1 + count nodes, or M if those are fewer. A prefix that cannot survive (-inf) is padding.
    """
    total, longest = paths.shape[1:]
    scores, order = scores.sort(dim=1, descending=True, stable=True)  # the root stays first
    scores, order = scores[:, : count + 1], order[:, : count + 1]
    real = scores > NEG_INF
    # Where each prefix stands in the tree, -1 if nowhere; and one place for what a path lacks.
    nodes = torch.arange(order.shape[1], device=tokens.device).expand_as(order)
    place = order.new_full((order.shape[0], total + 1), -1).scatter_(1, order, nodes)
    paths = paths.gather(1, order.unsqueeze(2).expand(-1, -1, longest))
    paths = place.gather(1, paths.flatten(1)).view_as(paths)
    paths.masked_fill_(~real.unsqueeze(2), -1)
    sources = source if isinstance(source, int) else source.gather(1, order)
    return DraftTree(
        token_ids=tokens.gather(1, order).masked_fill_(~real, -1),
        parents=paths[:, :, -2],
        depths=((paths >= 0).sum(2) - 1).clamp_(min=0),
        mask=_bits(paths),
        scores=scores.to(torch.float32),
        sources=(real & (nodes > 0)).to(torch.int8) * sources,
        num_nodes=real.sum(1),
    )


def _bits(paths: Tensor) -> Tensor:
    """Ancestor masks [B, N, W] from paths [B, N, n] of node numbers, -1 for none."""
    at = paths.clamp(min=0)
    bits = (1 << at % _WORD).masked_fill_(paths < 0, 0)
    words = paths.new_zeros(*paths.shape[:2], num_words(paths.shape[1]))
    return words.scatter_add_(2, at // _WORD, bits)
