"""Survival: how likely a proposed token is right, given that the path to it was.

A count ratio alone says little: a token that followed once before is right a quarter of the time
after a match of one token and nine times in ten after ten (measured on SmolLM2-135M-Instruct's
answers to Spec-Bench). So proposals are scored by an estimate that knows where the evidence came
from, how long the matched context is at that node, and the count ratio, and that is learned from
every emitted token: the first level of a proposal is judged by it even if nothing was verified.

Not here: which nodes are proposed (the drafters), or verified (`paceline.cost`, which corrects the
scores of any drafter once more, per request).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cost.outcomes import judge

_LENGTHS = (2, 3, 4, 6, 9, 15)  # borders of match-length classes, tokens
_RATIOS = (0.3, 0.45, 0.55, 0.8, 0.95)  # borders of count-ratio classes
_PRIOR_WEIGHT = 8.0  # observations that the prior is worth
_MEMORY = 400.0  # observations after which a class forgets half


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """A proposal as a drafter knows it. Parents precede children; -1 is the root.

    `probs[i]` is the raw probability of the path to node i, in (0, 1], not above its parent's.
    """

    source: int  # 1: the row's own text, 2: past outputs
    length: int  # tokens matched before the root's children
    tokens: Sequence[int]
    parents: Sequence[int]
    probs: Sequence[float]


class Survival:
    """Acceptance rates by source, match length and count ratio; deterministic."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int, int], tuple[float, float]] = {}  # hits, seen

    def scores(self, drafted: Drafted) -> list[float]:
        """Log survival of the path to every node: 0 or less, never above its parent's."""
        scores: list[float] = []
        depths: list[int] = []
        for i, parent in enumerate(drafted.parents):
            depth = depths[parent] + 1 if parent >= 0 else 0
            above = scores[parent] if parent >= 0 else 0.0
            length = drafted.length + depth
            chance = self.chance(drafted.source, length, _ratio(drafted, i))
            scores.append(above + math.log(chance))
            depths.append(depth)
        return scores

    def chance(self, source: int, length: int, ratio: float) -> float:
        """Probability that a token is right, given that its path is; in (0, 1].

        Args:
            source: as in `Drafted`.
            length: tokens of context that match up to the token, at least 1.
            ratio: the share of the context's occurrences that it followed, in (0, 1].
        """
        hits, seen = self._cells.get(_cell(source, length, ratio), (0.0, 0.0))
        prior = _prior(source, length, ratio) * _PRIOR_WEIGHT
        return min(1.0, (hits + prior) / (seen + _PRIOR_WEIGHT))

    def learn(self, drafted: Drafted, emitted: Sequence[int]) -> None:
        """Judge a proposal by what was emitted after its root, verified or not."""
        for i, depth, right in judge(drafted.tokens, drafted.parents, emitted):
            cell = _cell(drafted.source, drafted.length + depth, _ratio(drafted, i))
            hits, seen = self._cells.get(cell, (0.0, 0.0))
            if seen >= _MEMORY:
                hits, seen = hits / 2, seen / 2
            self._cells[cell] = (hits + right, seen + 1)


def _ratio(drafted: Drafted, node: int) -> float:
    parent = drafted.parents[node]
    return drafted.probs[node] / drafted.probs[parent] if parent >= 0 else drafted.probs[node]


def _cell(source: int, length: int, ratio: float) -> tuple[int, int, int]:
    return source, bisect_right(_LENGTHS, length), bisect_right(_RATIOS, ratio)


def _prior(source: int, length: int, ratio: float) -> float:
    """Fitted by eye to the measurement in the module's docstring.

    In the own text a context counts its present occurrence, so "followed once before" is 1/2.
    """
    if source == 1:
        return min(1.0, 1.8 * ratio) * length / (length + 1.2)
    return ratio * length / (length + 2.0)
