"""A host drafter that knows the answers and hides them in random trees; no tests here.

Tiny random models hardly repeat themselves, so text drafters are seldom right on them, and hardly ever
about a branch. The prophet is right to any depth, in any place among wrong siblings, with wrong nodes
below and above: what verify, walk, move and commit have to get right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from paceline.core.config import DraftConfig
from paceline.core.tree import EMPTY, Proposal
from paceline.draft.base import DrafterSpec, HostCommit

VOCABULARY = 97
LINE = "tests.engine.prophet:Prophet"


class Prophet:
    """Looks up what a row will say by its scope, in `answers`: scope -> prompt and output."""

    def __init__(self, config: DraftConfig) -> None:
        size = config.num_speculative_tokens
        self.spec = DrafterSpec(name="prophet", max_nodes=size + 1, max_depth=size, on_host=True)
        self.answers: dict[str, list[int]] = {}
        self._rows: dict[int, tuple[str, int]] = {}  # scope, tokens known
        self._random = random.Random(size)

    def join(self, row: int, tokens: Sequence[int], num_prompt: int, scope: str) -> None:
        assert list(tokens) == self.answers[scope][: len(tokens)], "the answer is another"
        self._rows[row] = scope, len(tokens)

    def observe(self, commit: HostCommit) -> None:
        for row, tokens in zip(commit.rows, commit.tokens, strict=True):
            scope, known = self._rows[row]
            self._rows[row] = scope, known + len(tokens)

    def propose(self, rows: Sequence[int], budgets: Sequence[int]) -> Sequence[Proposal]:
        return [self._tree(*self._rows[r], b) for r, b in zip(rows, budgets, strict=True)]

    def leave(self, row: int, *, keep: bool) -> None:
        del self._rows[row]

    def _tree(self, scope: str, known: int, budget: int) -> Proposal:
        draw = self._random
        truth = self.answers[scope][known:][: draw.randrange(1, 7)]
        count = draw.randrange(min(budget, self.spec.max_depth) + 1)
        if not count:
            return EMPTY
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        path = [-1]  # places of the true nodes, the root first
        taken = {(-1, truth[0])} if truth else set()
        for i in range(count):
            done = len(path) - 1
            if done < len(truth) and draw.random() < 0.5:
                parent, token = path[-1], truth[done]
                path.append(i)
                if done + 1 < len(truth):
                    taken.add((i, truth[done + 1]))
            else:
                parent, token = draw.choice([*path, *range(i)]), draw.randrange(VOCABULARY)
                while (parent, token) in taken:
                    token = draw.randrange(VOCABULARY)
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            above = scores[parent] if parent >= 0 else 0.0
            scores.append(above + draw.uniform(-1.0, 0.0))
        return Proposal(tokens=tokens, parents=parents, scores=scores, sources=[1] * count)
