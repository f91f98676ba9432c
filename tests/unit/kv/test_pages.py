"""PageAllocator's books and PageTable's entries. With a prefix cache: test_prefix.py."""

from __future__ import annotations

import pytest
import torch

from paceline.core.errors import PacelineError
from paceline.kv.pages import OutOfPagesError, PageAllocator, PageTable


def test_allocate_and_release_keep_the_books() -> None:
    """What is handed out is owned once, and comes back."""
    pages = PageAllocator(6)
    row = pages.allocate(4)
    assert len(set(row)) == 4
    assert (pages.num_available, pages.num_used, pages.num_cached) == (2, 4, 0)
    pages.check_integrity([row])
    pages.release(row)
    assert (pages.num_available, pages.num_used) == (6, 0)
    pages.check_integrity([])


def test_a_row_grows_into_the_pages_that_follow_it() -> None:
    """Attention reads a run of pages as one view: the hint must reach the free runs."""
    pages = PageAllocator(16)
    first, second = pages.allocate(2), pages.allocate(2)
    for _ in range(3):
        first += pages.allocate(1, first[-1])
        second += pages.allocate(1, second[-1])
    assert first == list(range(first[0], first[0] + 5))
    assert second == list(range(second[0], second[0] + 5))
    pages.check_integrity([first, second])


def test_shared_pages_are_free_only_after_their_last_owner() -> None:
    """Two rows share a prefix; the first to finish must not take it away from the other."""
    pages = PageAllocator(4)
    row = pages.allocate(2)
    pages.retain(row)
    pages.check_integrity([row, row])
    pages.release(row)
    assert pages.num_used == 2
    pages.check_integrity([row])
    pages.release(row)
    assert pages.num_used == 0


def test_too_many_pages_is_an_error_with_numbers_and_changes_nothing() -> None:
    """The scheduler preempts on this error; a half-done allocation would leak."""
    pages = PageAllocator(4)
    row = pages.allocate(3)
    with pytest.raises(OutOfPagesError, match="2 KV pages were asked for; 1 are free"):
        pages.allocate(2)
    assert issubclass(OutOfPagesError, PacelineError)
    assert pages.num_available == 1
    pages.check_integrity([row])


def test_release_beyond_the_last_owner_is_a_bug() -> None:
    """A double release would hand one page to two rows."""
    pages = PageAllocator(2)
    row = pages.allocate(1)
    pages.release(row)
    with pytest.raises(AssertionError, match="released more often"):
        pages.release(row)


def test_retaining_a_free_page_is_a_bug() -> None:
    """A free page has no content to share."""
    pages = PageAllocator(2)
    with pytest.raises(AssertionError, match="is free"):
        pages.retain([0])


def test_integrity_finds_a_leak_a_theft_and_a_double_hold() -> None:
    """The check that all engine tests lean on must itself be able to fail."""
    pages = PageAllocator(4)
    row = pages.allocate(2)
    with pytest.raises(AssertionError, match="differ from their holders"):
        pages.check_integrity([])  # leaked
    with pytest.raises(AssertionError, match="differ from their holders"):
        pages.check_integrity([row, row])  # shared without retain
    with pytest.raises(AssertionError, match="holds a page once"):
        pages.check_integrity([row + row[:1]])
    pages._free.give([row[0]])
    with pytest.raises(AssertionError, match="are free and held"):
        pages.check_integrity([row])


def test_page_table_points_at_the_dummy_until_assigned() -> None:
    """Padding rows and unassigned entries must never name a page that somebody owns."""
    table = PageTable(2, 3, "cpu", dummy_page=9)
    assert table.tensor.dtype == torch.int32
    assert table.tensor.tolist() == [[9] * 3] * 3
    table.assign(1, 1, [4, 5])
    table.assign(1, 0, [7])
    table.assign(0, 3, [])
    assert table.tensor.tolist() == [[9, 9, 9], [7, 4, 5], [9, 9, 9]]
    table.clear(1)
    assert table.tensor.tolist() == [[9] * 3] * 3


def test_page_table_refuses_the_padding_row_and_what_does_not_fit() -> None:
    """A slice that is too long would be cut silently, and tokens would go to the dummy page."""
    table = PageTable(2, 3, "cpu", dummy_page=9)
    with pytest.raises(AssertionError, match="padding row"):
        table.assign(2, 0, [1])
    with pytest.raises(AssertionError, match="do not fit"):
        table.assign(0, 2, [1, 2])
