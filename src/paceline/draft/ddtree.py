"""DDTree: the best tree over a DFlash block's distributions (Ringel, Romano; arXiv 2604.12989).

One block pass gives a distribution per position, whatever stands before it. So a path's survival is a
product over its positions, and the `budget` likeliest prefixes form a tree: a parent is at least as
likely as its child. The paper enumerates them with a heap, best first. Here they are found level by
level: of depth d at most `budget` prefixes can be among the best, and each extends one of those of
depth d - 1. A prefix that is the i-th best of its depth has, extended by the r-th candidate, at least
(i + 1)(r + 1) - 1 others before it, so only pairs within the budget are looked at. All rows at once, a
fixed number of tensor operations, no work per node: `best_first`. On a CPU, where a hundred small tensor
operations cost more than a thousand of Python's, `best_first_host` is the heap; the trees are equal.

At temperature 0 candidates are ranked by q, as published. At others by q and the target's own noise,
with survivals from the gaps (`candidates.py`): two children of a node then match the target more often
than any one-child rule that lacks the noise.

Order and ties: survival, then the shallower, then the one whose parent comes first, then rank.

Letters: B rows, P positions, C candidates, N nodes, W mask words, n pairs.
"""

from __future__ import annotations

import functools
import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.core.errors import ConfigError
from paceline.core.tree import NEG_INF, DraftTree, Proposal, from_proposals, num_words
from paceline.draft.dflash import SOURCE, DFlashBlock, load_net

if TYPE_CHECKING:
    from paceline.core.config import DraftConfig
    from paceline.draft.base import Commit, DraftRuntime, TargetInfo
    from paceline.draft.candidates import Candidates

_WORD = 64


class DDTreeDrafter:
    """The best tree of `num_speculative_tokens` nodes per row.

    Args:
        config: `model` is a DFlash drafter's folder, `num_speculative_tokens` the budget.
        target: facts, embedding and head of the target.

    Raises:
        ConfigError: the budget is 0, no folder is given, or the drafter does not belong to the target.
        ModelError: its files are missing, damaged or of a layout that is not supported.
    """

    def __init__(self, config: DraftConfig, target: TargetInfo) -> None:
        self._budget = config.num_speculative_tokens
        if self._budget < 1:
            msg = (
                f"ddtree was given a budget of {self._budget} nodes (num_speculative_tokens); 1 or "
                "more are needed. Choose drafter 'none' to decode without drafts."
            )
            raise ConfigError(msg)
        self._block = DFlashBlock(load_net(config, target), self._budget)
        self.spec = self._block.spec("ddtree", 1 + self._budget)

    def attach(self, runtime: DraftRuntime) -> None:
        """See `Drafter`."""
        self._block.attach(runtime)

    def observe(self, commit: Commit) -> None:
        """See `Drafter`."""
        self._block.observe(commit)

    def propose(self, rows: Tensor) -> DraftTree:
        """See `Drafter`."""
        found = self._block.candidates(rows, self._budget)
        build = best_first_host if rows.is_cpu else best_first
        return build(self._block.roots(rows), found, self._budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """Prefixes of one length, best first; n of them. The root is the prefix of length 0."""

    tokens: Tensor  # [B, n] int64, the last of each prefix
    scores: Tensor  # [B, n] log survival
    paths: Tensor  # [B, n, length + 1] place among all levels' prefixes of each prefix of it


def best_first(
    roots: Tensor, found: Candidates, budget: int, *, topk_cap: int | None = None
) -> DraftTree:
    """The `budget` best prefixes of every row, as a tree.

    Args:
        roots: [B] int64 newest tokens.
        found: candidates per position, best first, with log survivals.
        budget: nodes besides the root.
        topk_cap: most candidates of a position; default: as many as there are.

    Returns:
        N = 1 + budget nodes, or 1 + all prefixes if those are fewer. A prefix that cannot survive
        (-inf or NaN) is padding.
    """
    levels = _levels(roots, found, budget, topk_cap or found.ids.shape[2])
    longest, total = len(levels), sum(level.scores.shape[1] for level in levels)
    scores = torch.cat([level.scores for level in levels], dim=1)
    scores, order = scores.sort(dim=1, descending=True, stable=True)  # the root stays first
    scores, order = scores[:, : budget + 1], order[:, : budget + 1]
    real = scores > NEG_INF
    # Where each prefix stands in the tree, -1 if nowhere; and one place for what a path lacks.
    nodes = torch.arange(order.shape[1], device=roots.device).expand_as(order)
    place = order.new_full((order.shape[0], total + 1), -1).scatter_(1, order, nodes)
    lacking = [(longest - level.paths.shape[2], 0) for level in levels]
    paths = torch.cat(
        [pad(v.paths, short, value=total) for v, short in zip(levels, lacking, strict=True)], dim=1
    )
    paths = paths.gather(1, order.unsqueeze(2).expand(-1, -1, longest))
    paths = place.gather(1, paths.flatten(1)).view_as(paths)
    paths.masked_fill_(~real.unsqueeze(2), -1)
    tokens = torch.cat([level.tokens for level in levels], dim=1).gather(1, order)
    return DraftTree(
        token_ids=tokens.masked_fill_(~real, -1),
        parents=paths[:, :, -2] if longest > 1 else torch.full_like(order, -1),
        depths=((paths >= 0).sum(2) - 1).clamp_(min=0),
        mask=_bits(paths),
        scores=scores.to(torch.float32),
        sources=(real & (nodes > 0)).to(torch.int8) * SOURCE,
        num_nodes=real.sum(1),
    )


def best_first_host(
    roots: Tensor, found: Candidates, budget: int, *, topk_cap: int | None = None
) -> DraftTree:
    """`best_first` with a heap per row, as published; for a CPU. Arguments as there."""
    cap = topk_cap or found.ids.shape[2]
    weights = _sane(found.weights[:, :, :cap]).tolist()
    ids = found.ids[:, :, :cap].tolist()
    proposals = [_heap(w, t, budget) for w, t in zip(weights, ids, strict=True)]
    return from_proposals(roots.tolist(), proposals)


def _heap(weights: list[list[float]], ids: list[list[int]], budget: int) -> Proposal:
    """The best prefixes of one row: weights and ids are [P][C]."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # What may come next: cost, depth, parent, rank, and the parent's score.
    heap = [(-weights[0][0], 0, -1, 0, 0.0)]
    while heap and len(tokens) < budget:
        cost, depth, parent, rank, above = heapq.heappop(heap)
        if cost == math.inf:
            break
        own = len(tokens)
        tokens.append(ids[depth][rank])
        parents.append(parent)
        scores.append(-cost)
        if rank + 1 < len(weights[depth]):
            sibling = above + weights[depth][rank + 1]
            heapq.heappush(heap, (-sibling, depth, parent, rank + 1, above))
        if depth + 1 < len(weights):
            child = scores[own] + weights[depth + 1][0]
            heapq.heappush(heap, (-child, depth + 1, own, 0, scores[own]))
    return Proposal(tokens=tokens, parents=parents, scores=scores, sources=[SOURCE] * len(tokens))


def _levels(roots: Tensor, found: Candidates, budget: int, topk_cap: int) -> list[_Level]:
    """The root, then for each position the best prefixes that end there, at most `budget`."""
    weights = _sane(found.weights)
    rows, positions, count = weights.shape
    zero = torch.zeros(rows, 1, 1, dtype=torch.int64, device=roots.device)
    levels = [_Level(tokens=roots.view(-1, 1), scores=weights.new_zeros(rows, 1), paths=zero)]
    first = 1  # place of the level's first prefix
    for position in range(positions):
        above = levels[-1]
        known = above.scores.shape[1]
        parents, ranks = _pairs(known, min(count, topk_cap), budget, roots.device)
        scores = above.scores[:, parents] + weights[:, position, ranks]
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        scores, order = scores[:, :budget], order[:, :budget]
        size = order.shape[1]
        paths = above.paths.gather(1, parents[order].unsqueeze(2).expand(-1, -1, position + 1))
        own = torch.arange(first, first + size, device=roots.device).expand_as(order)
        levels.append(
            _Level(
                tokens=found.ids[:, position].gather(1, ranks[order]),
                scores=scores,
                paths=torch.cat((paths, own.unsqueeze(2)), dim=2),
            )
        )
        first += size
    return levels


def _sane(weights: Tensor) -> Tensor:
    """Log survivals of at most 0 in float64, in which sums of both builders are the same."""
    return weights.double().nan_to_num(nan=NEG_INF, neginf=NEG_INF).clamp(max=0.0)


@functools.lru_cache(maxsize=64)
def _pairs(known: int, count: int, budget: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which (prefix, candidate) pairs can be among the best `budget`: two lists [n]."""
    both = [(i, r) for i in range(known) for r in range(count) if (i + 1) * (r + 1) <= budget]
    parents, ranks = torch.tensor(both, dtype=torch.int64, device=device).unbind(1)
    return parents, ranks


def _bits(paths: Tensor) -> Tensor:
    """Ancestor masks [B, N, W] from paths [B, N, n] of node numbers, -1 for none."""
    at = paths.clamp(min=0)
    bits = (1 << at % _WORD).masked_fill_(paths < 0, 0)
    words = paths.new_zeros(*paths.shape[:2], num_words(paths.shape[1]))
    return words.scatter_add_(2, at // _WORD, bits)
