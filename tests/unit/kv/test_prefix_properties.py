"""Random life of a pool with its prefix cache, against a model that remembers every content."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.kv.pages import OutOfPagesError, PageAllocator
from paceline.kv.prefix import PrefixCache

SIZE, NUM_PAGES = 2, 12
SCOPES = st.sampled_from(["a", "b"])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@dataclass
class Row:
    scope: str
    tokens: list[int]
    pages: list[int]
    num_done: int


class Life(RuleBasedStateMachine):
    """Rows are admitted, grow, publish and end; the model knows what each page holds.

    `content[p]` is (scope, all tokens up to the page's end, and the lookahead's) once page p is full
    and they are known; `findable` is the set of such contents that the cache must find until
    something is evicted.
    """

    lookahead = 0

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(NUM_PAGES)
        self.cache = PrefixCache(self.pages, SIZE, lookahead=self.lookahead)
        self.rows: list[Row] = []
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.findable: set[tuple[str, tuple[int, ...]]] = set()

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Allocate; what is evicted leaves the model, and only as much as was needed."""
        evictions = max(0, count - self.pages.num_free)
        available = self.pages.num_available
        try:
            new = self.pages.allocate(count, after)
        except OutOfPagesError:
            assert count > available
            return None
        assert count <= available
        for page in new:
            self.content.pop(page, None)
        found = self.found()
        assert found <= self.findable
        assert len(self.findable - found) <= evictions
        self.findable = found
        return new

    def found(self) -> set[tuple[str, tuple[int, ...]]]:
        """Everything that the cache can find, by walking its tree."""
        out = set()
        todo = [(node, ()) for node in self.cache._roots.values()]
        while todo:
            node, before = todo.pop()
            for tokens, child in node.children.items():
                assert before[len(before) - self.lookahead :] in (tokens[: self.lookahead], ())
                path = before[: max(0, len(before) - self.lookahead)] + tokens
                out.add((node.scope, path))
                todo.append((child, path))
        return out

    def content_of(self, tokens: list[int], page: int) -> tuple[int, ...]:
        """What a row's page holds and depends on."""
        return tuple(tokens[: (page + 1) * SIZE + self.lookahead])

    def num_full(self, row: Row) -> int:
        """Pages of a row that are full, and known to depend on what."""
        return max(0, len(row.tokens) - self.lookahead) // SIZE

    def write(self, row: Row) -> None:
        """The row's own full pages now hold its tokens."""
        for i in range(self.num_full(row)):
            held = (row.scope, self.content_of(row.tokens, i))
            assert self.content.setdefault(row.pages[i], held) == held, "a shared page was written"

    def match(self, tokens: list[int], scope: str) -> list[int]:
        """Match, and check every page's content and that no longer match was missed."""
        hit = self.cache.match(tokens, scope)
        assert len(hit) * SIZE < len(tokens)
        for i, page in enumerate(hit):
            assert self.content[page] == (scope, self.content_of(tokens, i))
        end = (len(hit) + 1) * SIZE
        assert end >= len(tokens) or (scope, self.content_of(tokens, len(hit))) not in self.findable
        return hit

    @rule(scope=SCOPES, tokens=TOKENS)
    def admit(self, scope: str, tokens: list[int]) -> None:
        hit = self.match(tokens, scope)
        new = self.allocate(-(-len(tokens) // SIZE) - len(hit))
        if new is None:
            self.pages.release(hit)
            return
        row = Row(scope, tokens, hit + new, len(hit))
        self.write(row)
        self.rows.append(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        row = data.draw(st.sampled_from(self.rows))
        if len(row.tokens) == len(row.pages) * SIZE:
            new = self.allocate(1, row.pages[-1])
            if new is None:
                return
            row.pages += new
        row.tokens.append(token)
        self.write(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        row.num_done = self.cache.publish(row.tokens, row.pages, row.scope, row.num_done)
        assert row.num_done == self.num_full(row)
        self.findable |= {(row.scope, self.content_of(row.tokens, i)) for i in range(row.num_done)}

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        self.rows.remove(row)
        self.pages.release(row.pages)

    @rule(scope=SCOPES, tokens=TOKENS)
    def look(self, scope: str, tokens: list[int]) -> None:
        self.pages.release(self.match(tokens, scope))

    @invariant()
    def books_are_right(self) -> None:
        self.pages.check_integrity([row.pages for row in self.rows])
        assert self.found() == self.findable

    @invariant()
    def what_a_living_row_published_is_found(self) -> None:
        for row in self.rows:
            for i in range(row.num_done):
                assert (row.scope, self.content_of(row.tokens, i)) in self.findable


class LifeAhead(Life):
    """The same where a page's last entry depends on the token after it."""

    lookahead = 1


@pytest.mark.parametrize("life", [Life, LifeAhead])
@pytest.mark.parametrize("steps", [25, 80])
def test_any_life_keeps_the_books_and_finds_only_what_is_there(
    steps: int, life: type[Life]
) -> None:
    """No false hit, no lost page, no sharing across scopes, nothing owned twice; in any order."""
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        life, settings=settings(max_examples=60, stateful_step_count=steps, deadline=None)
    )
