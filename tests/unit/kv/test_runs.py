"""FreeRuns: few runs per row, and never a page twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.kv.runs import FreeRuns


def num_runs(pages: list[int]) -> int:
    """Runs of consecutive pages in a row's list."""
    return sum(1 for i, p in enumerate(pages) if i == 0 or pages[i - 1] + 1 != p)


def test_one_run_if_there_is_one() -> None:
    """Attention reads a run as one view; a split prompt costs a copy or a second product."""
    runs = FreeRuns(10)
    assert runs.take(4) == [0, 1, 2, 3]
    second = runs.take(3)
    assert num_runs(second) == 1
    assert runs.num_pages == 3


def test_rows_that_grow_in_turn_stay_one_run_each() -> None:
    """Eight requests decode together, page by page: not an interleaving of single pages."""
    runs = FreeRuns(256)
    rows = [runs.take(4) for _ in range(8)]
    for _ in range(10):
        for row in rows:
            row.extend(runs.take(1, after=row[-1]))
    assert [num_runs(row) for row in rows] == [1] * 8
    assert len({page for row in rows for page in row}) == 8 * 14


def test_what_can_not_be_one_run_is_few() -> None:
    """From holes of 1, 5 and 3 pages, seven come from the two largest."""
    runs = FreeRuns(12)
    runs.take(12)
    runs.give([0, 2, 3, 4, 5, 6, 8, 9, 10])
    pages = runs.take(7)
    assert num_runs(pages) == 2
    assert 0 not in pages
    assert sorted(pages + runs.take(2)) == [0, 2, 3, 4, 5, 6, 8, 9, 10]


def test_growth_takes_what_follows_and_then_another_run() -> None:
    """A hint that can be followed for one page only is followed for one page."""
    runs = FreeRuns(12)
    runs.take(12)
    runs.give([3, 7, 8, 9])
    assert runs.take(2, after=2)[0] == 3
    assert runs.take(1, after=4) != [5]


def test_taking_nothing_is_no_event() -> None:
    """A row that needs no page this step asks for zero."""
    runs = FreeRuns(3)
    assert runs.take(0) == []
    assert runs.take(0, after=0) == []
    assert runs.check() == {0, 1, 2}


def test_stale_heap_entries_do_not_pile_up() -> None:
    """A service allocates and frees for weeks; the heap must not grow with it."""
    runs = FreeRuns(64)
    for _ in range(2_000):
        pages = runs.take(9) + runs.take(5)
        runs.give(pages[::2])
        runs.give(pages[1::2])
    assert len(runs._heap) < 300
    assert runs.check() == set(range(64))


@given(data=st.data())
def test_random_takes_and_gives_equal_a_set(data: st.DataObject) -> None:
    """No page is handed out twice or lost, whatever the order."""
    total = data.draw(st.integers(1, 24))
    runs, free, held = FreeRuns(total), set(range(total)), []
    for _ in range(data.draw(st.integers(0, 25))):
        if held and data.draw(st.booleans()):
            back = data.draw(st.lists(st.sampled_from(held), unique=True))
            runs.give(back)
            free |= set(back)
            held = [p for p in held if p not in set(back)]
        else:
            longest = max((_run_from(free, p) for p in free), default=0)
            count = data.draw(st.integers(0, len(free)))
            pages = runs.take(count, data.draw(st.none() | st.integers(0, total)))
            assert len(pages) == count == len(set(pages))
            assert set(pages) <= free
            assert count == 0 or num_runs(pages) <= (2 if count <= longest else count)
            free -= set(pages)
            held += pages
        assert runs.check() == free


def _run_from(free: set[int], page: int) -> int:
    length = 0
    while page + length in free:
        length += 1
    return length
