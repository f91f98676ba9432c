"""DDTree's heap once more, and its goal by brute force."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

Table = Sequence[Sequence[float]]  # [P][C]
Node = tuple[int, int, float]  # token, parent (0: the root), log survival


def heap_tree(on: Table, off: Table, ids: Sequence[Sequence[int]], budget: int) -> list[Node]:
    """Best first over rank tuples: pop the best, push its next sibling and its first child.

    Weights are `on` where all ranks before are 0, else `off`; with equal ones it is the published heap.
    """
    heap = [
        (-on[0][0], (1, False, 0, 0), 0.0)
    ]  # cost; depth, strayed, parent, rank; parent's score
    found: list[Node] = []
    while heap and len(found) < budget:
        cost, (depth, strayed, parent, rank), above = heapq.heappop(heap)
        if cost == math.inf:
            break
        found.append((ids[depth - 1][rank], parent, -cost))
        weights = off if strayed else on
        if rank + 1 < len(weights[depth - 1]):
            score = above + weights[depth - 1][rank + 1]
            heapq.heappush(heap, (-score, (depth, strayed, parent, rank + 1), above))
        if depth < len(weights):
            below = strayed or rank > 0
            score = (off if below else on)[depth][0] - cost
            heapq.heappush(heap, (-score, (depth + 1, below, len(found), 0), -cost))
    return found


def best_sums(on: Table, off: Table, budget: int) -> list[float]:
    """Log survivals of the `budget` best prefixes, found by looking at all of them."""
    sums = [
        sum((off if any(ranks[:d]) else on)[d][r] for d, r in enumerate(ranks))
        for length in range(1, len(on) + 1)
        for ranks in itertools.product(range(len(on[0])), repeat=length)
    ]
    return sorted(sums, reverse=True)[:budget]
