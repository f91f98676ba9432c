"""SuffixTree: how often every string of up to `depth` tokens occurs in some texts.

A path-compressed tree of all suffixes, each cut after `depth` tokens. A node stands for a run of
tokens, named by where a suffix that holds it begins in the stored text and by the depths at which
the run begins (its parent's end) and ends; no token is stored twice. Each suffix makes at most one
leaf and one inner node, so memory is linear in the text. Node data lie in parallel lists: a million
small objects would cost the garbage collector a pause now and then.

One sequence at a time is open and grows at its end (`extend`); `close` makes it final and `evict`
removes the oldest closed one.

*Waiting suffixes.* The last suffixes of an open sequence that occurred before end inside the tree,
perhaps within a run. A suffix is counted by the nodes whose run it has passed to the end; one that
stands inside a run waits there and is added when counts are read. Longer suffixes come first and
each is moved by all new tokens at once. What waits is always the shortest suffixes: whoever leaves
the tree (gets a leaf) is longer than all who still wait, which is why a split never has to recount.

*Why eviction needs no re-labelling.* A node's run is read from the newest suffix that passed it,
so while it has any suffix left, the oldest sequence is not the one that holds its tokens.

Not here: reading counts (`suffix_counts.py`), what is proposed from them (`suffix_growth.py`).
Method: SuffixDecoding (Oliaro et al., arXiv 2411.04975).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

ROOT = 0
_WIDE = 32  # children from which on a node's frequent children are remembered
_SLACK = 1024  # dead tokens kept at the front of the text before it is cut


class _Frequent(NamedTuple):
    """First tokens of all children with `floor` or more occurrences, and perhaps of others."""

    floor: int
    tokens: set[int]


class SuffixTree:
    """Occurrence counts of all strings of at most `depth` tokens, with eviction of old sequences.

    The lists below are for `Counts` to read; only this class writes them. Places in the text are
    absolute: they do not move when old text is cut off.

    Args:
        depth: longest counted string, tokens.

    Attributes:
        text: tokens; `text[place - front]` is the token at a place.
        front: place of `text[0]`.
        open_at: place at which the open sequence begins.
        waiting: node of each waiting suffix, longest suffix first.
        count: per node, suffixes that passed its run to the end.
        latest: per node, place at which the newest of them begins.
        end: per node, depth at which its run ends; an open leaf's is `depth`.
        children: per node, first token of a child's run -> the child.
        num_steps: elementary steps done so far (nodes visited, runs compared); what the tests of
            linear time count.
    """

    def __init__(self, depth: int) -> None:
        assert depth >= 1, "a tree without depth counts nothing"
        self.depth = depth
        self.text: list[int] = []
        self.front = 0
        self.open_at = 0
        self.waiting: list[int] = []
        self.count: list[int] = [0]
        self.latest: list[int] = [0]
        self.end: list[int] = [0]
        self.children: list[dict[int, int] | None] = [{}]
        self.num_steps = 0
        self._dead = 0  # evicted tokens still at the front of the text
        self._closed: deque[int] = deque()  # lengths of closed sequences, oldest first
        self._free: list[int] = []
        self._frequent: dict[int, _Frequent] = {}

    def __len__(self) -> int:
        """Tokens held, of closed sequences and the open one."""
        return len(self.text) - self._dead

    @property
    def size(self) -> int:
        """Place after the last token."""
        return self.front + len(self.text)

    @property
    def num_nodes(self) -> int:
        """Nodes in use, the root included."""
        return len(self.count) - len(self._free)

    @property
    def num_sequences(self) -> int:
        """Closed sequences held."""
        return len(self._closed)

    def open_tokens(self, last: int | None = None) -> list[int]:
        """The open sequence, or its `last` tokens, as a copy."""
        begin = self.open_at - self.front
        return self.text[begin if last is None else max(begin, len(self.text) - last) :]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the open sequence: amortised O(depth) steps per token, usually a few."""
        text, front, depth_limit = self.text, self.front, self.depth
        ends, counts, latest, children = self.end, self.count, self.latest, self.children
        waiting, old_size = self.waiting, self.size
        first = old_size - len(waiting)
        text.extend(tokens)
        size = front + len(text)
        still: list[int] = []
        for start in range(first, size):
            here = start - front
            if start < old_size:  # its parent is not known
                node, depth, parent = waiting[start - first], old_size - start, -1
            else:
                node, depth, parent = ROOT, 0, -1
            limit = min(depth_limit, size - start)
            while depth < limit:
                self.num_steps += 1
                end = ends[node]
                if depth == end:
                    kids = children[node]
                    kid = kids.get(text[here + depth]) if kids else None
                    if kid is None:
                        self._add_leaf(node, text[here + depth], start)
                        break
                    parent, node, end = node, kid, ends[kid]
                    depth += 1
                upto = min(end, limit)
                if depth < upto:
                    there = latest[node] - front
                    if text[there + depth : there + upto] != text[here + depth : here + upto]:
                        while text[there + depth] == text[here + depth]:
                            depth += 1
                        self._split(node, depth, start, parent)
                        self._add_leaf(node, text[here + depth], start)
                        break
                    depth = upto
                if depth == end:
                    counts[node] += 1
                    latest[node] = start
                    if self._frequent:
                        self._note(parent, node)
            else:
                if limit < depth_limit:
                    still.append(node)
        self.waiting = still

    def close(self) -> None:
        """End the open sequence: its counts stay, nothing will follow its last token."""
        size = self.size
        if size == self.open_at:
            return
        first_waiting = size - len(self.waiting)
        for start in range(max(self.open_at, size - self.depth + 1), size):
            depth = size - start
            path = self._path(start, depth)
            node = path[-1]
            if start < first_waiting:
                self.end[node] = depth  # its own leaf, open until now
            elif depth < self.end[node]:
                self._split(node, depth, start, path[-2])
        self.waiting = []
        self._closed.append(size - self.open_at)
        self.open_at = size

    def evict(self) -> int:
        """Remove the oldest closed sequence; return how many tokens it had.

        Only between sequences: nothing may be open.
        """
        assert self.open_at == self.size, "close the open sequence first"
        length = self._closed.popleft()
        begin = self.front + self._dead
        for start in range(begin, begin + length):
            self._remove(start, min(self.depth, begin + length - start))
        self._dead += length
        if self._dead > _SLACK and 2 * self._dead > len(self.text):
            del self.text[: self._dead]
            self.front += self._dead
            self._dead = 0
        return length

    def children_with(self, node: int, least: int) -> Iterable[int]:
        """Children of `node` among which are all with at least `least` occurrences.

        A node near the root of a large tree has thousands; at most 1 / min_token_prob of them are
        ever wanted. Those found are remembered and kept complete by `_note`. While suffixes wait
        they add to counts unseen, so then all children are looked at.
        """
        kids = self.children[node] or {}
        if len(kids) <= _WIDE or self.waiting:
            return kids.values()
        frequent = self._frequent.get(node)
        if frequent is None or least < frequent.floor or len(frequent.tokens) > 4 * _WIDE:
            floor = max(1, least // 2)
            found = {token for token, kid in kids.items() if self.count[kid] >= floor}
            frequent = _Frequent(floor, found)
            self._frequent[node] = frequent
        return [kids[token] for token in frequent.tokens if token in kids]

    def _path(self, start: int, depth: int) -> list[int]:
        """Nodes from the root to the one whose run holds the last token of a suffix in the tree."""
        here = start - self.front
        path = [ROOT]
        while self.end[path[-1]] < depth:
            kids = self.children[path[-1]]
            assert kids is not None, "a suffix has left the tree"
            path.append(kids[self.text[here + self.end[path[-1]]]])
        self.num_steps += len(path)
        return path

    def _add_leaf(self, node: int, token: int, start: int) -> None:
        leaf = self._new_node(1, start, self.depth, None)
        kids = self.children[node]
        if kids is None:
            self.children[node] = {token: leaf}
            return
        kids[token] = leaf
        frequent = self._frequent.get(node)
        if frequent is not None and frequent.floor <= 1:
            frequent.tokens.add(token)

    def _split(self, node: int, depth: int, start: int, parent: int) -> None:
        """Cut the run of `node` at `depth`, where the suffix at `start` ends or turns off.

        The upper part keeps the number: so its parent and who waits on it need no change.
        """
        token = self.text[self.latest[node] - self.front + depth]
        lower = self._new_node(
            self.count[node], self.latest[node], self.end[node], self.children[node]
        )
        self._frequent.pop(node, None)
        self.children[node] = {token: lower}
        self.count[node] += 1
        self.latest[node] = start
        self.end[node] = depth
        self._note(parent, node)

    def _new_node(self, count: int, latest: int, end: int, kids: dict[int, int] | None) -> int:
        if self._free:
            node = self._free.pop()
            self.count[node], self.latest[node] = count, latest
            self.end[node], self.children[node] = end, kids
            return node
        self.count.append(count)
        self.latest.append(latest)
        self.end.append(end)
        self.children.append(kids)
        return len(self.count) - 1

    def _note(self, parent: int, node: int) -> None:
        """Keep `_frequent` complete after `node`, a child of `parent` (-1: unknown), gained."""
        if parent < 0:
            self._frequent.clear()
        frequent = self._frequent.get(parent)
        if frequent is not None and self.count[node] >= frequent.floor:
            frequent.tokens.add(self.text[self.latest[node] - self.front + self.end[parent]])

    def _remove(self, start: int, depth: int) -> None:
        path = self._path(start, depth)
        for node in path[1:]:
            self.count[node] -= 1
        while len(path) > 1 and self.count[path[-1]] == 0:
            self._release(path.pop())
            node = path[-1]
            kids = self.children[node] or {}
            del kids[self.text[start - self.front + self.end[node]]]
            if not kids and node != ROOT:
                self.children[node] = None
                self._frequent.pop(node, None)
        node = path[-1]
        kids = self.children[node] or {}
        if node == ROOT or len(kids) != 1:
            return
        (below,) = kids.values()
        if self.count[below] == self.count[node]:  # nothing ends or turns off between them
            self.latest[node], self.end[node] = self.latest[below], self.end[below]
            self.children[node] = self.children[below]
            self._frequent.pop(node, None)
            self._release(below)

    def _release(self, node: int) -> None:
        self.children[node] = None
        self._frequent.pop(node, None)
        self._free.append(node)
