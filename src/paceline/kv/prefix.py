"""PrefixCache: finds the pages that already hold the beginning of a prompt.

A full page is findable by what it holds and by everything before it: it is a node of a tree whose
edges are the tokens of one page. The edge's key is the tuple of those tokens, so a lookup hashes
one page and then *compares tokens*; an equal hash of different tokens finds nothing false. This is
the hash chain over full pages of vLLM and nano-vllm, with the parent's identity in place of the
parent's hash. Every scope (tenant) has a root of its own: scopes never share.

Where a drafter's entry also depends on the token after its own (`lookahead` 1, EAGLE-3), so does the
page's last entry, and the edge's key has that token too: a page is published once it is known, and a
prompt that goes on differently misses this page alone. (vLLM drops the last page of every hit instead.)

Eviction is least recently used, leaves first: a page whose parent is gone could not be found.
`PageAllocator.release` goes from a row's last page to its first, so the oldest cached page is
nearly always a leaf; where it is not, a leaf below it goes before it.

Two rows may compute the same page at the same time. The first to publish is found; the other's
page is its *twin*: private, freed with its row, but the row's later pages hang below the node that
both stand for. If the findable page of the two must be evicted first, the twin takes its place.

Not here: reference counts and free pages (`kv/pages.py`), the tensors (`kv/pool.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.kv.pages import PageAllocator


@dataclass(slots=True, eq=False)
class _Node:
    """One page's worth of tokens after one prefix. A scope's root stands for no page."""

    scope: str
    parent: _Node | None = None
    tokens: tuple[int, ...] = ()  # the page's, and `lookahead` more
    page: int = -1
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    twins: set[int] = field(default_factory=set)  # pages in use with the same content


class PrefixCache:
    """Prefixes of whole pages, findable by scope and tokens. Host only.

    Args:
        allocator: whose pages these are; the cache becomes its keeper.
        page_size: tokens per page.
        enabled: False finds nothing and keeps nothing.
        lookahead: how many tokens after a page its entries depend on (`DrafterSpec`).
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        *,
        enabled: bool = True,
        lookahead: int = 0,
    ) -> None:
        assert page_size > 0, "a page holds at least one token"
        assert lookahead in (0, 1), "an entry depends on the token after its own at most"
        self.page_size = page_size
        self.lookahead = lookahead
        self.enabled = enabled
        self._allocator = allocator
        self._roots: dict[str, _Node] = {}
        self._nodes: dict[int, _Node] = {}  # findable page -> its node
        self._twins: dict[int, _Node] = {}  # page in use, not findable -> node of equal content
        self._idle: OrderedDict[int, None] = OrderedDict()  # findable, no owner; oldest use first
        allocator.attach(self)

    def match(self, tokens: Sequence[int], scope: str) -> list[int]:
        """Find the longest cached prefix and retain its pages for the caller.

        At least one token is left to compute, since the step needs its hidden state: the pages
        cover at most len(tokens) - 1 tokens.

        Args:
            tokens: the prompt, or prompt and output of a resumed request.
            scope: whose pages may be found.

        Returns:
            Pages in order, now owned by the caller too: `PageAllocator.release` them.
        """
        node = self._roots.get(scope)
        pages: list[int] = []
        if node is None:
            return pages
        size = self.page_size
        for start in range(0, len(tokens) - size, size):
            node = node.children.get(tuple(tokens[start : start + size + self.lookahead]))
            if node is None:
                break
            pages.append(node.page)
        self._allocator.retain(pages)
        return pages

    def publish(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        scope: str,
        num_done: int,
        *,
        num_written: int | None = None,
    ) -> int:
        """Make a row's full pages findable. O(1) if no page has been filled since the last call.

        With `lookahead` a page is full once the token after it is known, too.

        Call it only for tokens whose entries are written, or certain to be written before any
        later step reads: not for the row's next token, which the pool does not hold yet.

        Args:
            tokens: the row's tokens from its first, `lookahead` more than are written if known.
            pages: the row's pages from its first, owned by the caller; at least the full ones.
            scope: who may find them; the same in every call for a row.
            num_done: the last call's result; at first, the number of pages that `match` found.
            num_written: how many of the tokens have their entries; None: all.

        Returns:
            The number of pages now done: all full ones. One whose equal was already there stays
            private to the caller and is found under the other's page.
        """
        size = self.page_size
        known = len(tokens) - self.lookahead
        num_full = (known if num_written is None else min(known, num_written)) // size
        if num_full <= num_done:
            return num_done
        if not self.enabled:
            return num_full
        node, first = self._resume(pages, scope, num_done)
        for i in range(first, num_full):
            key = tuple(tokens[i * size : (i + 1) * size + self.lookahead])
            node = self._extend(node, key, pages[i])
        return num_full

    @property
    def num_cached(self) -> int:
        """Findable pages without an owner."""
        return len(self._idle)

    def park(self, page: int) -> bool:
        """The page lost its last owner: keep it if it is findable."""
        if page in self._nodes:
            self._idle[page] = None
            return True
        node = self._twins.pop(page, None)
        if node is not None:
            node.twins.discard(page)
            self._touch(node)
        return False

    def unpark(self, page: int) -> None:
        """The cached page has an owner again."""
        assert page in self._idle, f"page {page} is not cached"
        del self._idle[page]

    def evict(self, count: int) -> list[int]:
        """Give up `count` cached pages, least recently used first, leaves before their parents."""
        assert count <= len(self._idle), "more pages are wanted than are cached"
        pages: list[int] = []
        while len(pages) < count:
            node = self._nodes[next(iter(self._idle))]
            while node.children and not node.twins:
                node = next(iter(node.children.values()))
            page = node.page
            idle = page in self._idle
            if node.twins:
                self._hand_over(node)
            else:
                self._forget(node)
            if idle:  # else an owned leaf stopped being findable: its owner keeps the page
                del self._idle[page]
                pages.append(page)
        return pages

    def check(self, refs: Sequence[int]) -> None:
        """Assert every invariant of the module's docstring; `refs` are the pages' owner counts."""
        found: dict[int, _Node] = {}
        for scope, root in self._roots.items():
            assert root.children, f"scope {scope!r} has a root and no page"
            for node in _below(root):
                assert node.scope == scope, f"page {node.page} is in two scopes"
                full = self.page_size + self.lookahead
                assert len(node.tokens) == full, f"page {node.page} is not full"
                assert node.page not in found, f"page {node.page} is found twice"
                found[node.page] = node
                for page in node.twins:
                    assert self._twins.get(page) is node, f"twin {page} does not know its node"
        assert found == self._nodes, "the findable pages are those of the tree"
        cached = {page for page in found if refs[page] == 0}
        assert cached == set(self._idle), "cached pages are the findable ones without an owner"
        assert not self._twins.keys() & found.keys(), "a twin can't be found itself"
        for page, node in self._twins.items():
            assert refs[page] > 0, f"twin {page} has no owner"
            assert page in node.twins, f"node of page {node.page} does not know its twin {page}"

    def _resume(self, pages: Sequence[int], scope: str, num_done: int) -> tuple[_Node, int]:
        """The deepest node that the row's done pages stand for, and the index of the next page."""
        for i in range(num_done - 1, -1, -1):  # the first round ends it, but for forgotten nodes
            node = self._nodes.get(pages[i]) or self._twins.get(pages[i])
            if node is not None:
                assert node.scope == scope, "a row publishes in one scope"
                return node, i + 1
        return self._roots.setdefault(scope, _Node(scope)), 0

    def _extend(self, parent: _Node, tokens: tuple[int, ...], page: int) -> _Node:
        """Let `page` stand for `tokens` after `parent`: findable, or a twin of what is there."""
        assert self._allocator.num_owners(page) > 0, f"page {page} is published without an owner"
        node = parent.children.get(tokens)
        if node is not None and node.page == page:
            return node
        assert page not in self._nodes, f"page {page} is published with other tokens"
        if node is None:
            node = _Node(parent.scope, parent, tokens, page)
            parent.children[tokens] = node
            self._nodes[page] = node
        else:
            node.twins.add(page)
            self._twins[page] = node
            self._touch(node)
        return node

    def _touch(self, node: _Node) -> None:
        if node.page in self._idle:
            self._idle.move_to_end(node.page)

    def _hand_over(self, node: _Node) -> None:
        """Let one of its twins be the findable page of `node`."""
        twin = node.twins.pop()
        del self._twins[twin]
        del self._nodes[node.page]
        self._nodes[twin] = node
        node.page = twin

    def _forget(self, leaf: _Node) -> None:
        parent = leaf.parent
        assert parent is not None, "a root stands for no page"
        del self._nodes[leaf.page]
        del parent.children[leaf.tokens]
        if not parent.children and parent.parent is None:
            del self._roots[parent.scope]


def _below(root: _Node) -> Iterator[_Node]:
    """All nodes under a root, parents first."""
    todo = list(root.children.values())
    while todo:
        node = todo.pop()
        yield node
        todo.extend(node.children.values())
