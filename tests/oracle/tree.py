"""Tree selection and the walk once more, with lists and dictionaries, and random trees to try.

The walk is the dictionary walk of the published tree verifiers (DDTree, SpecInfer), in our words.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from paceline.core.tree import Proposal


def random_proposal(rng: random.Random, num_nodes: int, vocab: int) -> Proposal:
    """A tree of any shape: chains, stars, bushes, forks with equal siblings and equal scores."""
    style = rng.choice(["chain", "star", "any", "any", "deep"])
    tokens, parents, scores = [], [], []
    for i in range(num_nodes):
        parent = {
            "chain": i - 1,
            "star": -1,
            "any": rng.randrange(-1, i),
            "deep": rng.randrange(max(-1, i - 3), i),
        }[style]
        above = scores[parent] if parent >= 0 else 0.0
        parents.append(parent)
        tokens.append(rng.randrange(vocab))
        # Whole and half steps, so that equal scores are common.
        scores.append(above - rng.choice([0.0, 0.0, 0.5, 0.5, 1.0, 3.0]))
    return Proposal(tokens=tokens, parents=parents, scores=scores)


def select(
    proposals: Sequence[Proposal], num_tokens: int, caps: Sequence[int], width: int
) -> list[list[int]]:
    """Selected nodes of each row, ascending, root = 0; grows the best one at a time."""
    chosen = [[0] if cap >= 0 else [] for cap in caps]
    spent = sum(len(c) for c in chosen)
    order = sorted(
        (-score, b * width + i + 1, b, i + 1)
        for b, p in enumerate(proposals)
        for i, score in enumerate(p.scores)
    )
    for _, _, b, node in order:
        if spent < num_tokens and 0 <= len(chosen[b]) - 1 < caps[b]:
            chosen[b].append(node)
            spent += 1
    return [sorted(c) for c in chosen]


def ancestors(proposal: Proposal, node: int) -> list[int]:
    """The node and everything above it, root last."""
    out = [node]
    while node > 0:
        node = proposal.parents[node - 1] + 1
        out.append(node)
    return out


def walk(
    root: int,
    proposal: Proposal,
    selected: Sequence[int],
    targets: dict[int, int],
    ends: set[int],
) -> list[int]:
    """Nodes of the accepted path, root first.

    `targets[node]` is the target's token after a selected node; `ends` are nodes whose token ends
    the row.
    """
    children: dict[int, dict[int, int]] = {}
    for node in selected:
        if node > 0:
            parent = proposal.parents[node - 1] + 1
            children.setdefault(parent, {}).setdefault(proposal.tokens[node - 1], node)
    path = [root]
    while path[-1] not in ends:
        found = children.get(path[-1], {}).get(targets[path[-1]])
        if found is None:
            break
        path.append(found)
    return path
