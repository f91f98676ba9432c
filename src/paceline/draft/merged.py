"""Merged: one tree of what several drafters propose, for instance a suffix tree and a network.

A copying drafter is right where the text repeats itself, a network elsewhere; and which of the two a step
needs is not known before it. So both propose, equal tokens at equal places become one node, and the
best nodes of all within the budget are verified.

*What a fold survives.* A drafter's scores are survivals of paths; what it knows is how likely a token is
*given that everything before it is right* (the difference to the parent's score). A token that several
propose at one place survives with the largest of these: they speak of the same event, not of independent
ones, so noisy-or would claim too much. A path's survival is the product of its tokens', whoever proposed
them; it is never below what one drafter claims for that path, never above its parent's. `sources` names
the drafter with the largest claim, the first of them where claims are equal.

    suffix   a .5 -> b .4        folded   a .6 (network) -> b .6 * .8 = .48 (suffix)
    network  a .6 -> c .3                                -> c .6 * .5 = .30 (network)

`fold` does this for lists, `fold_trees` for trees on a device, in fixed shapes and without a read.

Not here: who asks the parts and tells them what came of it (`engine/proposers.py`).

Letters: B rows, N nodes of a tree, M places: the root and the nodes of all trees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline import draft
from paceline.core.errors import ConfigError
from paceline.core.tree import NEG_INF, DraftTree, Proposal, from_proposals, num_words
from paceline.draft.base import DrafterSpec
from paceline.draft.best_nodes import best_of
from paceline.ops.reference.growth import best_nodes

if TYPE_CHECKING:
    from paceline.core.config import DraftConfig

_TOKENS = 1 << 32  # more than there are token ids


class Merged:
    """What is made of the parts' proposals, and which parts those are.

    Args:
        config: `parts` names the drafters; their own settings, `model` and the budget are theirs too.

    Raises:
        ConfigError: a part is unknown, named twice or cannot be one, or there are two networks.
    """

    def __init__(self, config: DraftConfig) -> None:
        _check(config.parts)
        self.parts = tuple(replace(config, method=name) for name in config.parts)
        self._name = config.method
        self._budget = config.num_speculative_tokens

    def join(self, specs: Sequence[DrafterSpec]) -> DrafterSpec:
        """Facts of the whole, from the parts'. Of networks there is one at most."""
        network = next((spec for spec in specs if not spec.on_host), None)
        proposed = sum(spec.max_nodes - 1 for spec in specs)
        whole = DrafterSpec(
            name=self._name,
            max_nodes=1 + min(self._budget, proposed),
            max_depth=max(spec.max_depth for spec in specs),
            on_host=network is None,
            parts=tuple(spec.name for spec in specs),
            sources={number: name for spec in specs for number, name in spec.sources.items()},
        )
        if network is None:
            return whole
        return replace(
            network,
            name=whole.name,
            max_nodes=whole.max_nodes,
            max_depth=whole.max_depth,
            parts=whole.parts,
            sources=whole.sources,
        )

    def fold(self, proposals: Sequence[Proposal], budget: int) -> Proposal:
        """The best `budget` nodes of one row's proposals."""
        return best_of(fold(proposals), min(budget, self._budget))

    def fold_trees(self, roots: Tensor, trees: Sequence[DraftTree], max_depth: int) -> DraftTree:
        """The best nodes of every row, on the trees' device. See `fold_trees`."""
        return fold_trees(roots, trees, self._budget, max_depth)


def fold(proposals: Sequence[Proposal]) -> Proposal:
    """All nodes of one row's proposals, each (parent, token) once.

    Nodes stand in the order in which they were proposed first. A node that cannot survive (-inf, NaN)
    is left out, with what is below it.
    """
    tokens: list[int] = []
    parents: list[int] = []
    gains: list[float] = []
    sources: list[int] = []
    known: dict[tuple[int, int], int] = {}
    for proposal in proposals:
        place = {-1: -1}  # a node's number in the proposal -> in the fold
        for i, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
            score = proposal.scores[i]
            if not score > NEG_INF or parent not in place:
                continue
            gain = min(0.0, score - (proposal.scores[parent] if parent >= 0 else 0.0))
            source = proposal.sources[i] if proposal.sources else 1
            key = place[parent], token
            own = place[i] = known.setdefault(key, len(tokens))
            if own == len(tokens):
                tokens.append(token)
                parents.append(key[0])
                gains.append(gain)
                sources.append(source)
            elif gain > gains[own]:
                gains[own], sources[own] = gain, source
    scores: list[float] = []
    for gain, parent in zip(gains, parents, strict=True):
        scores.append(gain + (scores[parent] if parent >= 0 else 0.0))
    return Proposal(tokens=tokens, parents=parents, scores=scores, sources=sources)


def fold_trees(roots: Tensor, trees: Sequence[DraftTree], budget: int, max_depth: int) -> DraftTree:
    """The best nodes of the trees' fold, for every row.

    Equal nodes are found from the root downwards: two are the same if their tokens are and their parents
    were found to be. That takes `max_depth` rounds of comparing all with all.

    Args:
        roots: [B] int64 newest tokens; what the trees say of them is not looked at.
        trees: each [B, N]; -inf scores are padding.
        budget: nodes besides the root.
        max_depth: of the deepest node that any tree may have.

    Returns:
        N = 1 + budget nodes, or M if those are fewer.
    """
    tokens, above, gains, sources = _laid_out(roots, trees)
    batch, places = tokens.shape
    own = torch.arange(places, device=tokens.device).expand(batch, -1)
    real = gains > NEG_INF
    stands_for = own  # the first place that is the same node
    same = own.unsqueeze(2) == own.unsqueeze(1)
    for _ in range(max_depth):
        key = torch.where(real, stands_for.gather(1, above) * _TOKENS + tokens, -1 - own)
        key = torch.where(own == 0, -1, key)
        same = key.unsqueeze(2) == key.unsqueeze(1)
        stands_for = same.to(torch.int64).argmax(2)
    claims = torch.where(same, gains.unsqueeze(1), NEG_INF)
    gains, best = claims.amax(2), claims.argmax(2)
    above = stands_for.gather(1, above)
    scores = torch.zeros_like(gains)
    for _ in range(max_depth):  # level by level, so that no child is rounded above its parent
        scores = gains + scores.gather(1, above)
    scores = torch.where(stands_for == own, scores, NEG_INF)
    nothing = above.new_full((batch, 1), places)
    upwards = torch.cat((torch.where(own == 0, places, above), nothing), dim=1)
    path = [own]
    for _ in range(max_depth):
        path.append(upwards.gather(1, path[-1]))
    if max_depth == 0:
        path.append(nothing)
    paths = torch.stack(path[::-1], dim=2)
    return best_nodes(tokens, scores, paths, budget, sources.gather(1, best))


def _laid_out(roots: Tensor, trees: Sequence[DraftTree]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The root and the trees' nodes one tree after the other, each [B, M].

    Returns:
        Tokens, places of the parents (of root and padding: 0), log survivals given the parent (root: 0,
        padding: -inf), sources.
    """
    zeros = torch.zeros_like(roots).unsqueeze(1)
    tokens, above = [roots.unsqueeze(1)], [zeros]
    gains, sources = [zeros.to(torch.float32)], [zeros.to(torch.int8)]
    first = 1
    for tree in trees:
        parents = tree.parents[:, 1:].clamp(min=0)
        scores = tree.scores[:, 1:]
        gain = scores - tree.scores.gather(1, parents)
        gain = torch.where(scores > NEG_INF, gain, NEG_INF)
        tokens.append(tree.token_ids[:, 1:])
        above.append(torch.where(parents > 0, parents + (first - 1), 0))
        gains.append(gain.nan_to_num(nan=NEG_INF, neginf=NEG_INF).clamp(max=0.0))
        sources.append(tree.sources[:, 1:])
        first += scores.shape[1]
    laid = [torch.cat(parts, dim=1) for parts in (tokens, above, gains, sources)]
    return laid[0], laid[1], laid[2], laid[3]


def padded_tree(proposals: Sequence[Proposal], max_nodes: int) -> DraftTree:
    """Host lists as a tree of a fixed shape, N = `max_nodes`. Roots are unknown here: 0."""
    tree = from_proposals([0] * len(proposals), proposals)
    lacking = max_nodes - tree.token_ids.shape[1]
    assert lacking >= 0, "a drafter proposes no more than it promised"
    words = num_words(max_nodes) - tree.mask.shape[2]
    return DraftTree(
        token_ids=pad(tree.token_ids, (0, lacking), value=-1),
        parents=pad(tree.parents, (0, lacking), value=-1),
        depths=pad(tree.depths, (0, lacking)),
        mask=pad(tree.mask, (0, words, 0, lacking)),
        scores=pad(tree.scores, (0, lacking), value=-math.inf),
        sources=pad(tree.sources, (0, lacking)),
        num_nodes=tree.num_nodes,
    )


def _check(parts: Sequence[str]) -> None:
    """Raise ConfigError with everything that is wrong with the parts."""
    possible = [name for name in (*draft.DRAFTERS, *draft.NETWORKS) if name != "none"]
    networks = [name for name in parts if name in draft.NETWORKS]
    problems = []
    wrong = [repr(name) for name in parts if name not in possible]
    if wrong:
        problems.append(f"{', '.join(wrong)} cannot be a part; possible: {', '.join(possible)}")
    if len(set(parts)) < len(parts):
        problems.append("a drafter is named twice")
    if len(set(networks)) > 1:
        problems.append(
            f"{' and '.join(networks)} are networks, of which one at most has a cache here"
        )
    if not parts:
        problems.append("no drafter is named")
    if problems:
        msg = (
            f"parts {list(parts)!r} cannot be merged: {'; '.join(problems)}. Name drafters that "
            "copy, and one network at most, for instance suffix and ddtree."
        )
        raise ConfigError(msg)
