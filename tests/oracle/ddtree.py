"""DDTree's heap once more, and its goal by brute force."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

Node = tuple[int, int, float]  # token, parent (0: the root), log survival


def heap_tree(
    weights: Sequence[Sequence[float]], ids: Sequence[Sequence[int]], budget: int
) -> list[Node]:
    """Best first over rank tuples: pop the best, push its next sibling and its first child."""
    heap = [(-weights[0][0], (1, 0, 0), 0.0)]  # cost; depth, parent and rank; the parent's score
    found: list[Node] = []
    while heap and len(found) < budget:
        cost, (depth, parent, rank), above = heapq.heappop(heap)
        if cost == math.inf:
            break
        found.append((ids[depth - 1][rank], parent, -cost))
        if rank + 1 < len(weights[depth - 1]):
            score = above + weights[depth - 1][rank + 1]
            heapq.heappush(heap, (-score, (depth, parent, rank + 1), above))
        if depth < len(weights):
            score = weights[depth][0] - cost
            heapq.heappush(heap, (-score, (depth + 1, len(found), 0), -cost))
    return found


def best_sums(weights: Sequence[Sequence[float]], budget: int) -> list[float]:
    """Log survivals of the `budget` best prefixes, found by looking at all of them."""
    sums = [
        sum(weights[d][r] for d, r in enumerate(ranks))
        for length in range(1, len(weights) + 1)
        for ranks in itertools.product(range(len(weights[0])), repeat=length)
    ]
    return sorted(sums, reverse=True)[:budget]
