"""PrefixCache: what is found, by whom, and in which order it goes."""

from __future__ import annotations

import pytest

from paceline.kv.pages import OutOfPagesError, PageAllocator
from paceline.kv.prefix import PrefixCache

SIZE = 4
X = 99  # the token after a full prompt: at least one is always computed


def make(num_pages: int = 8, size: int = SIZE) -> tuple[PageAllocator, PrefixCache]:
    """An empty pool with its cache."""
    pages = PageAllocator(num_pages)
    return pages, PrefixCache(pages, size)


def fill(
    pages: PageAllocator, cache: PrefixCache, tokens: list[int], scope: str = ""
) -> tuple[list[int], int]:
    """Admit, compute and publish a row; return its pages and how many of them were found."""
    row = cache.match(tokens, scope)
    hits = len(row)
    row += pages.allocate(-(-len(tokens) // cache.page_size) - hits)
    cache.publish(tokens, row, scope, hits)
    return row, hits


def test_second_equal_prompt_computes_only_its_last_page() -> None:
    """The point of the cache: a shared prefix is computed once, while its first owner lives."""
    pages, cache = make()
    prompt = list(range(10))
    row, hits = fill(pages, cache, prompt)
    assert hits == 0
    assert cache.match(prompt, "") == row[:2]
    pages.check_integrity([row, row[:2]])


def test_pages_without_owner_are_found_until_they_are_needed() -> None:
    """A finished request leaves its prompt behind: cached is neither free nor in use."""
    pages, cache = make(num_pages=4)
    row, _ = fill(pages, cache, list(range(10)))
    pages.release(row)
    assert (pages.num_free, pages.num_cached, pages.num_used) == (2, 2, 0)
    assert pages.num_available == 4
    pages.check_integrity([])
    again = cache.match(list(range(10)), "")
    assert again == row[:2]
    assert (pages.num_free, pages.num_cached, pages.num_used) == (2, 0, 2)
    pages.release(again)
    pages.check_integrity([pages.allocate(4)])
    assert cache.match(list(range(10)), "") == []


@pytest.mark.parametrize("length, found", [(0, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_at_least_one_token_is_left_to_compute(length: int, found: int) -> None:
    """A prompt that is cached as a whole would have no hidden state to pick from."""
    pages, cache = make()
    fill(pages, cache, list(range(8)))
    assert len(cache.match(list(range(length)), "")) == found


def test_scopes_never_share() -> None:
    """One tenant must not learn by timing what another has asked."""
    pages, cache = make()
    row, _ = fill(pages, cache, list(range(8)), "a")
    assert cache.match([*range(8), X], "b") == []
    assert cache.match([*range(8), X], "") == []
    other, hits = fill(pages, cache, list(range(8)), "b")
    assert hits == 0
    assert cache.match([*range(8), X], "b") == other
    assert cache.match([*range(8), X], "a") == row


def test_equal_pages_after_different_prefixes_differ() -> None:
    """Keys depend on everything before: the same four tokens elsewhere are another page."""
    pages, cache = make()
    fill(pages, cache, [1, 1, 1, 1, 5, 5, 5, 5])
    assert cache.match([5, 5, 5, 5, X], "") == []
    second, hits = fill(pages, cache, [2, 2, 2, 2, 5, 5, 5, 5])
    assert hits == 0
    assert cache.match([2, 2, 2, 2, 5, 5, 5, 5, X], "") == second


def test_prompts_that_part_share_what_is_before() -> None:
    """A system prompt is shared by conversations that go different ways."""
    pages, cache = make()
    first, _ = fill(pages, cache, [*range(8), 20, 21, 22, 23])
    second, hits = fill(pages, cache, [*range(8), 30, 31, 32, 33])
    assert hits == 2
    assert second[:2] == first[:2]
    assert cache.match([*range(8), 30, 31, 32, 33, X], "") == second
    assert cache.match([*range(8), 20, 21, 22, 23, X], "") == first
    assert cache.match([*range(8), 20, 21, 22, 99, X], "") == first[:2]


def test_equal_hashes_of_different_tokens_find_nothing() -> None:
    """A false hit would answer one user with another's context."""
    modulus = 2**61 - 1  # Python's hash of an int is the int modulo this
    real, alias = (1, 2, 3, 4), (1 + modulus, 2, 3, 4)
    assert hash(real) == hash(alias)
    pages, cache = make()
    row, _ = fill(pages, cache, list(real))
    assert cache.match([*alias, X], "") == []
    other, hits = fill(pages, cache, list(alias))
    assert hits == 0
    assert cache.match([*real, X], "") == row
    assert cache.match([*alias, X], "") == other


def test_output_is_published_as_it_grows() -> None:
    """A conversation's next turn finds the answer of the last one, not only the prompt."""
    pages, cache = make()
    tokens, row, done = list(range(6)), pages.allocate(2), 0
    for token in range(6, 13):
        done = cache.publish(tokens, row, "", done)
        assert done == len(tokens) // SIZE
        tokens.append(token)
        if len(tokens) > len(row) * SIZE:
            row += pages.allocate(1, row[-1])
    assert cache.match(tokens, "") == row[:3]


def test_only_written_tokens_are_published() -> None:
    """The next token is known before its entry is in the pool; its page must not be found yet."""
    pages, cache = make()
    tokens, row = list(range(8)), pages.allocate(2)
    assert cache.publish(tokens, row, "", 0, num_written=7) == 1
    assert cache.match([*tokens, X], "") == row[:1]
    assert cache.publish(tokens, row, "", 1, num_written=8) == 2
    assert cache.match([*tokens, X], "") == row


def test_a_step_without_a_new_full_page_reads_no_token() -> None:
    """Publishing runs for every row in every step; it must not cost O(length)."""

    class Untouchable(list[int]):
        def __getitem__(self, _: object) -> int:  # type: ignore[override]
            raise AssertionError("read a token")

        def __iter__(self) -> None:  # type: ignore[override]
            raise AssertionError("read the tokens")

    _, cache = make()
    assert cache.publish(Untouchable(range(11)), Untouchable(), "", 2) == 2


def test_two_equal_prompts_in_one_step_are_twins() -> None:
    """Both rows compute the page, both publish: one is found, the other stays its row's own."""
    pages, cache = make()
    prompt = list(range(8))
    first, second = pages.allocate(2), pages.allocate(2)
    assert cache.match([*prompt, X], "") == []
    assert cache.publish(prompt, first, "", 0) == 2
    assert cache.publish(prompt, second, "", 0) == 2
    pages.check_integrity([first, second])
    hit = cache.match([*prompt, X], "")
    assert hit == first
    pages.release(hit)
    pages.release(second)
    assert (pages.num_free, pages.num_cached) == (6, 0)  # the twin is not cached twice
    pages.release(first)
    assert (pages.num_free, pages.num_cached) == (6, 2)
    pages.check_integrity([])


def test_a_twin_row_goes_on_publishing_below_the_shared_pages() -> None:
    """What the slower twin computes later must be found after the pages of the faster one."""
    pages, cache = make()
    prompt = list(range(8))
    first, second = pages.allocate(2), pages.allocate(3)
    cache.publish(prompt, first, "", 0)
    done = cache.publish(prompt, second, "", 0)
    longer = [*prompt, 50, 51, 52, 53]
    read = []

    class Spied(list[int]):
        def __getitem__(self, at: slice) -> list[int]:  # type: ignore[override]
            read.append(at)
            return super().__getitem__(at)

    assert cache.publish(Spied(longer), second, "", done) == 3
    assert read == [slice(8, 12)]  # and not its whole prompt again
    assert cache.match([*longer, X], "") == [*first, second[2]]


def test_a_recomputed_last_page_does_not_replace_the_cached_one() -> None:
    """A prompt that ends at a page's end computes that page again; a shared one stays shared."""
    pages, cache = make()
    prompt = list(range(8))
    first, _ = fill(pages, cache, prompt)
    second, hits = fill(pages, cache, prompt)
    assert hits == 1
    assert second[0] == first[0]
    assert second[1] != first[1]
    assert cache.match([*prompt, X], "") == first


def test_the_least_recently_used_goes_first_and_leaves_before_parents() -> None:
    """A parent that went before its child would leave a page that nobody can find."""
    pages, cache = make(num_pages=5)
    old = [*range(8)]
    new = [*range(4), 60, 61, 62, 63]
    first, _ = fill(pages, cache, old)
    second, _ = fill(pages, cache, new)
    pages.release(first)
    pages.release(second)
    assert (pages.num_free, pages.num_cached) == (2, 3)
    held = pages.allocate(3)
    assert cache.match([*old, X], "") == first[:1]
    pages.check_integrity([held, first[:1]])
    pages.release(first[:1])
    held += pages.allocate(1)
    assert cache.match([*new, X], "") == first[:1]
    pages.release(first[:1])
    held += pages.allocate(1)
    assert cache.match([*new, X], "") == []
    pages.check_integrity([held])


def test_a_finished_row_is_queued_leaf_first() -> None:
    """Else each eviction would search the row's whole chain for its leaf."""
    pages, cache = make()
    row, _ = fill(pages, cache, list(range(12)))
    pages.release(row)
    assert list(cache._idle) == row[::-1]


def test_a_hit_renews_what_it_found() -> None:
    """Least recently *used*: a system prompt in daily use outlives a newer one that was used once."""
    pages, cache = make(num_pages=2)
    first, _ = fill(pages, cache, [1, 1, 1, 1])
    second, _ = fill(pages, cache, [2, 2, 2, 2])
    pages.release(first)
    pages.release(second)
    pages.release(cache.match([1, 1, 1, 1, X], ""))
    pages.allocate(1)
    assert cache.match([2, 2, 2, 2, X], "") == []
    assert cache.match([1, 1, 1, 1, X], "") == first


def test_use_through_a_twin_is_use() -> None:
    """What was computed once more a moment ago is not the least recently used."""
    pages, cache = make(num_pages=4)
    first, second = pages.allocate(1), pages.allocate(1)
    done = cache.publish([1, 1, 1, 1], first, "", 0)
    cache.publish([1, 1, 1, 1], second, "", 0)
    other, _ = fill(pages, cache, [2, 2, 2, 2])
    pages.release(first)
    pages.release(other)
    pages.release(second)  # the twin's row ends last
    pages.allocate(3)
    assert cache.match([2, 2, 2, 2, X], "") == []
    assert cache.match([1, 1, 1, 1, X], "") == first
    assert done == 1


def test_publishing_what_is_cached_is_use() -> None:
    """The row that recomputed a cached page keeps the cached one fresh."""
    pages, cache = make(num_pages=3)
    first, _ = fill(pages, cache, [1, 1, 1, 1])
    pages.release(first)
    other, _ = fill(pages, cache, [2, 2, 2, 2])
    pages.release(other)
    again, hits = fill(pages, cache, [1, 1, 1, 1])
    assert hits == 0
    assert again != first
    assert pages.allocate(1) == other
    assert cache.match([1, 1, 1, 1, X], "") == first


def test_a_matched_page_is_not_evicted() -> None:
    """Between match and the first step the row owns its hits; pressure must fail elsewhere."""
    pages, cache = make(num_pages=3)
    row, _ = fill(pages, cache, list(range(8)))
    pages.release(row)
    hit = cache.match([*range(4), X], "")
    assert hit == row[:1]
    with pytest.raises(OutOfPagesError, match="1 are free and 1 can be evicted, of 3"):
        pages.allocate(3)
    assert row[0] not in pages.allocate(2)
    assert cache.match([*range(4), X], "") == hit


def test_a_twin_takes_the_place_of_an_evicted_page() -> None:
    """The faster twin has left and its pages are needed: the slower one's row is found instead."""
    pages, cache = make(num_pages=5)
    prompt = list(range(8))
    first, second = pages.allocate(2), pages.allocate(3)
    cache.publish(prompt, first, "", 0)
    longer = [*prompt, 50, 51, 52, 53]
    cache.publish(longer, second, "", cache.publish(prompt, second, "", 0))
    pages.release(first)
    assert pages.num_available == 2
    assert sorted(pages.allocate(2)) == sorted(first)
    assert cache.match([*longer, X], "") == second
    pages.check_integrity([first, second, second])
    pages.release(second)
    pages.release(second)
    assert pages.num_cached == 3
    pages.check_integrity([first])


def test_a_row_that_let_go_of_its_prefix_is_forgotten_not_lost() -> None:
    """Pages in use below an evicted one can't be found; they stay their owner's, who goes on."""
    pages, cache = make(num_pages=4)
    tokens, row = list(range(12)), pages.allocate(4)
    done = cache.publish(tokens, row, "", 0)
    pages.release(row[:1])  # keeps 1, 2, 3: no engine does that, and it must still be sound
    taken = pages.allocate(1)
    assert taken == row[:1]
    assert cache.match([*tokens, X], "") == []
    pages.check_integrity([row[1:], taken])
    pages.release(taken)
    pages.retain([])
    back = pages.allocate(1)
    tokens += [70, 71, 72, 73]
    done = cache.publish(tokens, [*back, *row[1:]], "", done)
    assert done == 4
    assert cache.match([*tokens, X], "") == [*back, *row[1:]]
    pages.check_integrity([[*back, *row[1:]]] * 2)


def test_publishing_a_page_without_owner_is_a_bug() -> None:
    """It could be handed to another row while it is found."""
    pages, cache = make()
    row = pages.allocate(1)
    pages.release(row)
    with pytest.raises(AssertionError, match="without an owner"):
        cache.publish(list(range(4)), row, "", 0)


def test_publishing_one_page_with_two_contents_is_a_bug() -> None:
    """A page that was written over would be found under its old tokens."""
    pages, cache = make()
    row = pages.allocate(1)
    cache.publish([1, 2, 3, 4], row, "", 0)
    with pytest.raises(AssertionError, match="with other tokens"):
        cache.publish([1, 2, 3, 5], row, "", 0)


def test_changing_scope_in_mid_row_is_a_bug() -> None:
    """The rest of a row would be found by another tenant."""
    pages, cache = make()
    row = pages.allocate(2)
    done = cache.publish(list(range(4)), row, "a", 0)
    with pytest.raises(AssertionError, match="one scope"):
        cache.publish(list(range(8)), row, "b", done)


def test_disabled_it_finds_and_keeps_nothing() -> None:
    """`prefix_cache = False` must not change what is available."""
    pages = PageAllocator(4)
    cache = PrefixCache(pages, SIZE, enabled=False)
    row = pages.allocate(2)
    assert cache.publish(list(range(8)), row, "", 0) == 2
    assert cache.match([*range(8), X], "") == []
    pages.release(row)
    assert (pages.num_free, pages.num_cached) == (4, 0)
    pages.check_integrity([])


def test_scopes_without_pages_leave_nothing_behind() -> None:
    """A service sees a new scope per user; its memory must be bounded by the pool."""
    pages, cache = make(num_pages=2)
    for user in range(50):
        row, _ = fill(pages, cache, list(range(8)), f"user {user}")
        pages.release(row)
        pages.check_integrity([])
    assert len(cache._roots) == 1


def test_the_token_after_a_page_belongs_to_it_where_an_entry_depends_on_it() -> None:
    """With lookahead a page is published once the token after it is known, and a prompt that goes on
    with another misses this page alone; both continuations stay findable side by side.
    """
    pages = PageAllocator(8)
    cache = PrefixCache(pages, SIZE, lookahead=1)
    tokens = list(range(8))
    row = pages.allocate(2)
    assert cache.publish(tokens, row, "", 0) == 1, "what follows the second page is not known yet"
    assert cache.publish([*tokens, 20], row, "", 1, num_written=8) == 2
    assert cache.match([*tokens, 20, X], "") == row
    assert cache.match([*tokens, 21, X], "") == row[:1]
    other = row[:1] + pages.allocate(1)
    assert cache.publish([*tokens, 21], other, "", 1) == 2
    assert cache.match([*tokens, 21, X], "") == other
    assert cache.match([*tokens, 20, X], "") == row


def test_what_ran_past_a_stop_is_not_published_with_lookahead() -> None:
    """A page whose last entry was made with a token that was cut off is never found."""
    pages = PageAllocator(8)
    cache = PrefixCache(pages, SIZE, lookahead=1)
    row = pages.allocate(2)
    kept = list(range(8))  # both pages are written, the second with a token after the stop
    assert cache.publish(kept, row, "", 0, num_written=8) == 1
    assert cache.match([*kept, 8, X], "") == row[:1]
