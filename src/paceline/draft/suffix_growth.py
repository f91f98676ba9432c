"""From counts to a proposal: which continuation of a matched context is worth proposing.

Follows SuffixDecoding (Oliaro et al., arXiv 2411.04975). For every matching suffix of m tokens of
the context: at most min(limit, floor(factor x m)) nodes are grown, as a *path* (always the most
frequent follower) or as a *tree* (best first over all followers), each with the probability of its
path, the product of count(string + token) / count(string), and none below `min_prob`. The score of
m is the sum of those probabilities: the accepted length it expects. The best m wins, the longer one
on a tie. So short or ambiguous matches propose little by themselves. The context's own occurrence
at the end of the text is counted too: what followed once before has probability 1/2, n times
n / (n + 1).

Ties between followers, by this project's choice: more occurrences first, then the one whose latest
occurrence begins later; between nodes of different parents, who was found first.

Not here: where counts come from (`suffix_counts.py`), whose counts are asked (`suffix.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.draft.suffix_counts import Counts, Follower, Place

Shape = Literal["tree", "path"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The settings of a proposal (`DraftConfig`'s suffix fields)."""

    factor: float
    min_prob: float
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Nodes below a matched context; parents index into the same lists, -1 is the root."""

    length: int  # tokens matched
    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    probs: Sequence[float] = ()  # of the path to the node
    score: float = 0.0  # their sum


NOTHING = Growth(length=0)


def best_growth(
    counts: Counts, suffixes: Sequence[Place], limit: int, rule: Rule, above: Growth = NOTHING
) -> Growth:
    """The best proposal over all matching suffixes, or `above` if none scores strictly more.

    Args:
        counts: what was seen.
        suffixes: places of the context's suffixes of 1, 2, ... tokens.
        limit: most nodes.
        rule: how to grow.
        above: what has to be beaten.
    """
    best = above
    before = 0
    for length in range(len(suffixes), 0, -1):
        budget = min(limit, int(rule.factor * length))
        if budget <= best.score:
            break  # no probability exceeds 1, and shorter suffixes have no larger budget
        place = suffixes[length - 1]
        total = counts.count(place)
        if total == before:
            continue  # it occurs only inside the longer suffix: same followers, smaller budget
        before = total
        growth = _grow(counts, place, total, length, budget, rule)
        if growth.score > best.score:
            best = growth
    return best


def _grow(counts: Counts, place: Place, total: int, length: int, budget: int, rule: Rule) -> Growth:
    width = 1 if rule.shape == "path" else None
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    score = 0.0
    heap: list[tuple[float, int, int, Follower]] = []  # (-probability, found, parent, who)
    found = 0
    parent, prob = -1, 1.0
    while True:
        for who in _likely(counts, place, total, prob, rule.min_prob)[:width]:
            heapq.heappush(heap, (-prob * who.times / total, found, parent, who))
            found += 1
        if not heap:
            break
        key, _, above, who = heapq.heappop(heap)
        prob = -key
        parent = len(tokens)
        parents.append(above)
        tokens.append(who.token)
        probs.append(prob)
        score += prob
        if len(tokens) == budget:
            break
        place, total = who.place, who.times
    return Growth(length=length, tokens=tokens, parents=parents, probs=probs, score=score)


def _likely(
    counts: Counts, place: Place, total: int, prob: float, min_prob: float
) -> list[Follower]:
    """Followers whose path keeps at least `min_prob`, most likely first."""
    found = counts.followers(place, max(1, int(min_prob * total / prob)))
    if len(found) > 1:
        found.sort(key=_rank)
    while found and prob * found[-1].times / total < min_prob:
        found.pop()
    return found


def _rank(who: Follower) -> tuple[int, int]:
    return (-who.times, -who.latest)
