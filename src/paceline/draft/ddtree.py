"""DDTree: the best tree over a DFlash block's distributions (Ringel, Romano; arXiv 2604.12989).

One block pass gives a distribution per position, whatever stands before it. So a path's survival is a
product over its positions, and the `budget` likeliest prefixes form a tree: a parent is at least as
likely as its child. The paper enumerates them with a heap, best first.

One thing is added: a candidate survives less often after a path that has left the *spine* (the best
candidate of every position), so there its weight is another (`candidates.py`). With equal weights this
is the published tree.

`best_first` finds the tree level by level: of depth d at most `budget` prefixes can be among the best,
and each extends one of those of depth d - 1. Off the spine, the i-th best prefix of a depth, extended by
the r-th candidate, has at least (i + 1)(r + 1) - 1 others before it, so only pairs within the budget are
looked at. All rows at once, a fixed number of tensor operations, no work per node. On a CPU, where a
hundred small tensor operations cost more than a thousand of Python's, `best_first_host` is the heap; the
trees are equal.

At temperature 0 candidates are ranked by q, as published. At others by q and the target's own noise,
with survivals from the gaps (`candidates.py`): two children of a node then match the target more often
than any one-child rule that lacks the noise.

Order and ties: survival, then the shallower, then children of the spine, then the one whose parent
comes first, then rank.

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
from paceline.core.tree import NEG_INF, DraftTree, Proposal, from_proposals
from paceline.draft.best_nodes import best_nodes
from paceline.draft.dflash import SOURCE, DFlashBlock, load_net

if TYPE_CHECKING:
    from paceline.core.config import DraftConfig
    from paceline.draft.base import Commit, DraftRuntime, TargetInfo
    from paceline.draft.candidates import Candidates
    from paceline.draft.dflash_net import DFlashNet


class DDTreeDrafter:
    """The best tree of `num_speculative_tokens` nodes per row.

    Args:
        config: `model` is a DFlash drafter's folder, `num_speculative_tokens` the budget.
        target: facts, embedding and head of the target.
        net: the network, where it does not come from that folder.

    Raises:
        ConfigError: the budget is 0, no folder is given, or the drafter does not belong to the target.
        ModelError: its files are missing, damaged or of a layout that is not supported.
    """

    def __init__(
        self, config: DraftConfig, target: TargetInfo, net: DFlashNet | None = None
    ) -> None:
        self._budget = config.num_speculative_tokens
        if self._budget < 1:
            msg = (
                f"ddtree was given a budget of {self._budget} nodes (num_speculative_tokens); 1 or "
                "more are needed. Choose drafter 'none' to decode without drafts."
            )
            raise ConfigError(msg)
        net = load_net(config, target) if net is None else net
        self._block = DFlashBlock(net, self._budget)
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
    longest, total = found.ids.shape[1] + 1, sum(level.scores.shape[1] for level in levels)
    lacking = [(longest - level.paths.shape[2], 0) for level in levels]
    return best_nodes(
        torch.cat([level.tokens for level in levels], dim=1),
        torch.cat([level.scores for level in levels], dim=1),
        torch.cat(
            [pad(v.paths, short, value=total) for v, short in zip(levels, lacking, strict=True)],
            dim=1,
        ),
        budget,
        SOURCE,
    )


def _levels(roots: Tensor, found: Candidates, budget: int, topk_cap: int) -> list[_Level]:
    """The root; then for each position the spine's prefix, and the best others that end there."""
    on, off = _sane(found.weights), _sane(found.off_spine)
    rows, positions, count = on.shape
    width, device = min(count, topk_cap), roots.device
    place = torch.zeros(rows, 1, 1, dtype=torch.int64, device=device)
    spine = _Level(tokens=roots.view(-1, 1), scores=on.new_zeros(rows, 1), paths=place)
    others = _Level(tokens=place[:, :0, 0], scores=on.new_zeros(rows, 0), paths=place[:, :0])
    levels, first = [spine], 1  # `first`: place of the level's first prefix
    for position in range(positions):
        parents, ranks = _pairs(others.scores.shape[1], width, budget, device)
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
            tokens=found.ids[:, position, :1],
            scores=spine.scores + on[:, position, :1],
            paths=torch.cat((spine.paths, own[:, :1]), dim=2),
        )
        others = _Level(
            tokens=found.ids[:, position].gather(1, ranks),
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


def best_first_host(
    roots: Tensor, found: Candidates, budget: int, *, topk_cap: int | None = None
) -> DraftTree:
    """`best_first` with a heap per row, as published; for a CPU. Arguments as there."""
    width = min(topk_cap or budget, budget)
    on, off = (_sane(w[:, :, :width]).tolist() for w in (found.weights, found.off_spine))
    ids = found.ids[:, :, :width].tolist()
    rows = range(len(ids))
    proposals = [_heap(on[b], off[b], ids[b], budget) for b in rows]
    return from_proposals(roots.tolist(), proposals)


def _heap(
    on: list[list[float]], off: list[list[float]], ids: list[list[int]], budget: int
) -> Proposal:
    """The best prefixes of one row; weights on and off the spine, and ids, are [P][C]."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # What may come next: cost, depth, whether after another path than the spine, parent, rank; and
    # the parent's score.
    heap = [(-on[0][0], 0, False, -1, 0, 0.0)]
    while heap and len(tokens) < budget:
        cost, depth, beside, parent, rank, above = heapq.heappop(heap)
        if cost == math.inf:
            break
        own = len(tokens)
        tokens.append(ids[depth][rank])
        parents.append(parent)
        scores.append(-cost)
        weights = off if beside else on
        if rank + 1 < len(weights[depth]):
            sibling = above + weights[depth][rank + 1]
            heapq.heappush(heap, (-sibling, depth, beside, parent, rank + 1, above))
        if depth + 1 < len(weights):
            strays = beside or rank > 0
            child = scores[own] + (off if strays else on)[depth + 1][0]
            heapq.heappush(heap, (-child, depth + 1, strays, own, 0, scores[own]))
    return Proposal(tokens=tokens, parents=parents, scores=scores, sources=[SOURCE] * len(tokens))


def _sane(weights: Tensor) -> Tensor:
    """Log survivals of at most 0 in float64, in which sums of both builders are the same."""
    return weights.double().nan_to_num(nan=NEG_INF, neginf=NEG_INF).clamp(max=0.0)


@functools.lru_cache(maxsize=64)
def _pairs(known: int, count: int, budget: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which (prefix, candidate) pairs can be among the best `budget`: two lists [n]."""
    both = [(i, r) for i in range(known) for r in range(count) if (i + 1) * (r + 1) <= budget]
    pairs = torch.tensor(both, dtype=torch.int64, device=device).view(-1, 2)
    return pairs[:, 0], pairs[:, 1]
