"""A drafter network that proposes random trees and writes down what it is told.

Its "network" is nothing; its cache is real: for every token that became final it stores the token,
the token after it, its position and a sum of the tapped features, at the target's slot numbers. So a
test can compare every cache row with what a fresh prefill would write.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from paceline.core.config import DraftConfig
from paceline.core.tree import DraftTree, Proposal, from_proposals
from paceline.draft.base import Commit, DrafterSpec, DraftKV, DraftRuntime, TargetInfo

TAPS = (0, 1)


class Scribe:
    """Random trees; a cache of one layer, one head, four numbers a token."""

    def __init__(self, config: DraftConfig, target: TargetInfo) -> None:
        size = config.num_speculative_tokens
        self.spec = DrafterSpec(
            name="scribe",
            max_nodes=size + 1,
            max_depth=size,
            on_host=False,
            aux_layers=TAPS,
            kv=DraftKV(num_layers=1, num_kv_heads=1, head_dim=4),
            scratch=3,
        )
        self._size = size
        self._vocab = target.config.vocab_size
        self._random = random.Random(4)
        self.hints: dict[int, list[int]] = {}  # root token -> likely continuation

    def attach(self, runtime: DraftRuntime) -> None:
        self.runtime = runtime

    def observe(self, commit: Commit) -> None:
        assert commit.hidden is not None
        row = torch.stack(
            [
                commit.token_ids.double(),
                commit.next_ids.double(),
                commit.positions.double(),
                commit.hidden.double().sum(1),
            ],
            dim=1,
        ).unsqueeze(1)
        self.runtime.write(0, commit.slots, row, row)

    def propose(self, rows: Tensor) -> DraftTree:
        """Random trees of random sizes; a third of the tokens are guesses that often come true."""
        width = 3
        mask = torch.full((width, 1), 7, dtype=torch.int64)
        batch = self.runtime.block(rows, torch.zeros(len(rows), width, dtype=torch.int64), mask)
        scratch = torch.full((len(rows) * width, 1, 4), torch.nan, dtype=torch.float64)
        self.runtime.write(0, batch.slots, scratch, scratch)  # dirty, as a real block pass is
        roots = self.runtime.next_token(rows).tolist()
        return from_proposals(roots, [self._tree(t) for t in roots])

    def _tree(self, root: int) -> Proposal:
        draw = self._random
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        taken: set[tuple[int, int]] = set()
        for i in range(draw.randrange(self._size + 1)):
            parent = draw.randrange(-1, i)
            before = tokens[parent] if parent >= 0 else root
            likely = self.hints.get(before)
            token = draw.choice(likely) if likely and draw.random() < 0.8 else 0
            while (parent, token) in taken:
                token = draw.randrange(self._vocab)
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            above = scores[parent] if parent >= 0 else 0.0
            scores.append(above + min(0.0, draw.uniform(-2.0, 0.5)))
        return Proposal(tokens=tokens, parents=parents, scores=scores, sources=[3] * len(tokens))
