"""Drafters for the toy model: right often enough, right once, or made of given paths."""

from __future__ import annotations

import random
from collections.abc import Sequence

from paceline.core.tree import EMPTY, Proposal
from tests.oracle import tree as tree_oracle
from tests.oracle.toy import Propose, ToyModel


def drafting(model: ToyModel, rng: random.Random, nodes: int) -> Propose:
    """A drafter that is right often enough: random trees over each text's likeliest tokens."""

    def propose(text: Sequence[int]) -> Proposal:
        shape = tree_oracle.random_proposal(rng, rng.randint(0, nodes), 1)
        paths: list[list[int]] = []
        for parent in shape.parents:
            above = paths[parent] if parent >= 0 else []
            logits = model.table[model.hidden([*text, *above])]
            best = logits.topk(4).indices.tolist()
            paths.append(
                [
                    *above,
                    best[0]
                    if rng.random() < 0.6
                    else rng.choice([*best, rng.randrange(len(logits))]),
                ]
            )
        return Proposal(tokens=[p[-1] for p in paths], parents=shape.parents, scores=shape.scores)

    return propose


def once(prop: Proposal, at: int) -> Propose:
    """Proposes when the text has a certain length, and nothing otherwise."""
    return lambda text: prop if len(text) == at else EMPTY


def of_paths(paths: set[tuple[int, ...]], rng: random.Random) -> Proposal:
    """The tree that holds these paths (closed under prefixes), siblings in random order."""
    order = sorted(paths, key=lambda p: (len(p), rng.random()))
    return Proposal(
        tokens=[p[-1] for p in order],
        parents=[order.index(p[:-1]) if len(p) > 1 else -1 for p in order],
        scores=[-1.0 * len(p) for p in order],
    )
