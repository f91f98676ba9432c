"""Suffix decoding by brute force: counts by scanning the texts, proposals straight from them.

An oracle for `paceline.draft`: slow on purpose, no tree, no sharing with the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Texts:
    """Sequences side by side on one line of places; none continues into the next."""

    sequences: list[tuple[int, list[int]]]  # (place of the first token, tokens)

    def starts(self, string: Sequence[int]) -> list[int]:
        """Places at which `string` begins, in rising order."""
        n = len(string)
        return [
            at + i
            for at, tokens in self.sequences
            for i in range(len(tokens) - n + 1)
            if tokens[i : i + n] == list(string)
        ]

    def followers(self, string: Sequence[int]) -> list[tuple[int, int, int]]:
        """(count, latest start, token) of every token seen after `string`, best first."""
        seen: dict[int, list[int]] = {}
        n = len(string)
        for at, tokens in self.sequences:
            for i in range(len(tokens) - n):
                if tokens[i : i + n] == list(string):
                    seen.setdefault(tokens[i + n], []).append(at + i)
        found = [(len(places), max(places), token) for token, places in seen.items()]
        return sorted(found, reverse=True)


Nodes = list[tuple[int, int, float]]  # token, parent, probability of the path


def grow(
    texts: Texts, match: Sequence[int], budget: int, min_prob: float, *, one_child: bool
) -> Nodes:
    """The best `budget` nodes below `match`: repeatedly the likeliest candidate, oldest on ties."""
    nodes: Nodes = []
    open_list: list[tuple[float, int, int, list[int]]] = []  # prob, token, parent, string

    def expand(parent: int, prob: float, string: list[int]) -> None:
        total = len(texts.starts(string))
        for rank, (count, _, token) in enumerate(texts.followers(string)):
            child = prob * count / total
            if child >= min_prob and not (one_child and rank):
                open_list.append((child, token, parent, [*string, token]))

    expand(-1, 1.0, list(match))
    while open_list and len(nodes) < budget:
        best = max(open_list, key=lambda c: c[0])
        open_list.remove(best)
        prob, token, parent, string = best
        nodes.append((token, parent, prob))
        expand(len(nodes) - 1, prob, string)
    return nodes


def propose(
    own: Texts,
    past: Texts,
    context: Sequence[int],
    budget: int,
    *,
    longest: int,
    factor: float,
    min_prob: float,
    one_child: bool,
) -> tuple[Nodes, int]:
    """The proposal after `context` and its source (1 own, 2 past, 0 none)."""
    best: tuple[float, int, Nodes] = (0.0, 0, [])
    for source, texts in ((1, own), (2, past)):
        for m in range(min(longest, len(context)), 0, -1):
            match = list(context[-m:])
            if not texts.starts(match):
                continue
            limit = min(budget, math.floor(factor * m))
            nodes = grow(texts, match, limit, min_prob, one_child=one_child)
            score = 0.0
            for _, _, prob in nodes:
                score += prob
            if score > best[0]:
                best = (score, source, nodes)
    return best[2], best[1]
