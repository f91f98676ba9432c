"""DDTree: the best tree over a DFlash block's distributions (Ringel, Romano; arXiv 2604.12989).

One block pass gives a distribution per position, whatever stands before it. So a path's survival is a
product over its positions, and the `budget` likeliest prefixes form a tree: a parent is at least as
likely as its child. The paper enumerates them with a heap, best first.

One thing is added: a candidate survives less often after a path that has left the *spine* (the best
candidate of every position), so there its weight is another (`candidates.py`). With equal weights this
is the published tree.

`best_first` grows the tree on the device: a kernel on a GPU, else level by level (`ops.best_first`). On a
CPU, where a hundred small tensor operations cost more than a thousand of Python's, `best_first_host` is the
heap; the trees are equal.

At temperature 0 candidates are ranked by q, as published. At others by q and the target's own noise,
with survivals from the gaps (`candidates.py`): two children of a node then match the target more often
than any one-child rule that lacks the noise.

Order and ties: survival, then the shallower, then children of the spine, then the one whose parent
comes first, then rank.

Letters: B rows, P positions, C candidates, N nodes.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from torch import Tensor

from paceline import ops
from paceline.core.errors import ConfigError
from paceline.core.tree import DraftTree, Proposal, from_proposals
from paceline.draft.dflash import SOURCE, DFlashBlock, load_net
from paceline.ops.reference.growth import sane

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
        roots = self._block.roots(rows)
        found = self._block.candidates(rows, roots, self._budget)
        build = best_first_host if rows.is_cpu else best_first
        return build(roots, found, self._budget)


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
    width = topk_cap or found.ids.shape[2]
    return ops.best_first(roots, found.ids, found.weights, found.off_spine, budget, width, SOURCE)


def best_first_host(
    roots: Tensor, found: Candidates, budget: int, *, topk_cap: int | None = None
) -> DraftTree:
    """`best_first` with a heap per row, as published; for a CPU. Arguments as there."""
    width = min(topk_cap or budget, budget)
    on, off = (sane(w[:, :, :width]).tolist() for w in (found.weights, found.off_spine))
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
