"""Counts: reads a SuffixTree: where a string lies, how often it occurs, what follows it how often.

Made once per proposal: it adds the waiting suffixes of the open sequence, which the tree's nodes do
not count yet, and is stale after the tree's next change.

Not here: how the tree grows and shrinks (`suffix_tree.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.draft.suffix_tree import ROOT, SuffixTree


class Place(NamedTuple):
    """A string in the tree: it ends `depth` tokens below the root, within the run of `node`."""

    node: int
    depth: int


class Follower(NamedTuple):
    """A token seen after a string: how often, and where the latest such occurrence begins."""

    times: int
    latest: int
    token: int
    place: Place


class Counts:
    """Exact counts of the tree's texts as they are now.

    Args:
        tree: what to read.
    """

    def __init__(self, tree: SuffixTree) -> None:
        self._tree = tree
        self._inside: dict[int, list[int]] = {}  # node -> depths waiting in its run, deepest first
        depth = len(tree.waiting)
        for node in tree.waiting:
            if depth < tree.end[node]:
                self._inside.setdefault(node, []).append(depth)
            depth -= 1

    def own_suffixes(self, longest: int) -> list[Place]:
        """Places of the open sequence's suffixes of 1, 2, ... tokens that also occurred before.

        Args:
            longest: at most that many.
        """
        waiting = self._tree.waiting
        count = min(longest, len(waiting))
        return [Place(waiting[-length], length) for length in range(1, count + 1)]

    def find_suffixes(self, context: Sequence[int], longest: int) -> list[Place]:
        """Places of the suffixes of `context` of 1, 2, ... tokens, up to the longest that occurs.

        A string occurs only if its own suffixes do, so the first miss ends the search.
        """
        found = []
        for length in range(1, min(longest, len(context), self._tree.depth) + 1):
            place = self.find(context[-length:])
            if place is None:
                break
            found.append(place)
        return found

    def find(self, tokens: Sequence[int]) -> Place | None:
        """Where a string of at most the tree's depth lies; None if it does not occur."""
        tree = self._tree
        node, depth, total = ROOT, 0, len(tokens)
        while depth < total:
            kids = tree.children[node]
            kid = kids.get(tokens[depth]) if kids else None
            if kid is None:
                return None
            upto = min(tree.end[kid], total)
            there = tree.latest[kid] - tree.front
            if tree.text[there + depth : there + upto] != list(tokens[depth:upto]):
                return None  # also where the text ends before `upto`
            node, depth = kid, upto
        return Place(node, depth)

    def count(self, place: Place) -> int:
        """Occurrences of the string at `place`."""
        node, depth = place
        if node == ROOT:
            return len(self._tree)
        inside = self._inside.get(node)
        return self._tree.count[node] + (_at_least(inside, depth) if inside else 0)

    def followers(self, place: Place, least: int) -> list[Follower]:
        """The tokens seen after the string at `place` at least `least` times, in no order."""
        tree = self._tree
        node, depth = place
        if depth < tree.end[node]:
            return self._next_in_run(node, depth, least)
        found = []
        for kid in tree.children_with(node, least):
            inside = self._inside.get(kid)
            count = tree.count[kid] + (len(inside) if inside else 0)
            if count >= least:
                newest = tree.latest[kid]
                token = tree.text[newest - tree.front + depth]
                if inside:
                    newest = tree.size - inside[-1]
                found.append(Follower(count, newest, token, Place(kid, depth + 1)))
        return found

    def _next_in_run(self, node: int, depth: int, least: int) -> list[Follower]:
        tree = self._tree
        newest = tree.latest[node]
        if newest + depth >= tree.size:
            return []  # an open leaf: the text ends here
        count = tree.count[node]
        token = tree.text[newest - tree.front + depth]
        inside = self._inside.get(node)
        if inside:
            deeper = _at_least(inside, depth + 1)
            if deeper:  # who waits is newer than who passed
                count += deeper
                newest = tree.size - inside[deeper - 1]
        return [Follower(count, newest, token, Place(node, depth + 1))] if count >= least else []


def _at_least(depths: Sequence[int], depth: int) -> int:
    """How many of `depths` are `depth` or more."""
    return sum(1 for d in depths if d >= depth)
