"""FreeRuns: which pages are free, as runs of consecutive ids. Bookkeeping of `PageAllocator` only.

Attention reads a run of consecutive pages as one view, so what counts is how few runs a row's pages
form, at once and after the row has grown. Hence two rules: take from the longest run, and take from
its middle, which leaves room to grow both to the new row and to the one before the run.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

_SLACK = 64  # stale heap entries that are tolerated before the heap is made anew


class FreeRuns:
    """The free pages of a pool, initially all. Each page given or taken costs O(1) or a heap step."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages  # free pages
        self._length: dict[int, int] = {0: num_pages}  # first page -> length of its run
        self._first: dict[int, int] = {num_pages - 1: 0}  # last page -> first page of its run
        self._heap = [(-num_pages, 0)]  # (-length, first); entries go stale, `_longest` skips them

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Remove `count` pages (there must be as many) and return them in order of use.

        The pages that follow `after` come first if they are free. What remains is one run if a
        run is long enough, else the longest runs there are.
        """
        assert count <= self.num_pages, "the caller checks that there are enough pages"
        pages: list[int] = []
        if after is not None and count > 0 and after + 1 in self._length:
            pages.extend(self._carve(after + 1, 0, min(count, self._length[after + 1])))
        while len(pages) < count:
            first, length = self._longest()
            need = min(count - len(pages), length)
            offset = (length - need) // 2 if first > 0 else 0
            pages.extend(self._carve(first, offset, need))
        return pages

    def give(self, pages: Sequence[int]) -> None:
        """Add pages, joining them with the runs beside them."""
        touched = set()
        for page in pages:
            first, last = page, page
            if page - 1 in self._first:
                first = self._first.pop(page - 1)
                del self._length[first]
            if page + 1 in self._length:
                last = page + self._length.pop(page + 1)
                del self._first[last]
            self._length[first] = last - first + 1
            self._first[last] = first
            touched.add(first)
        self.num_pages += len(pages)
        for first in touched:
            if first in self._length:
                self._push(first)

    def check(self) -> set[int]:
        """Assert the invariants; return all free pages."""
        free: set[int] = set()
        for first, length in self._length.items():
            assert length > 0, f"run at {first} is empty"
            assert self._first[first + length - 1] == first, f"run at {first} has no end"
            assert first + length not in self._length, f"runs meet at {first + length}"
            assert (-length, first) in self._heap, f"run at {first} can't be found"
            pages = set(range(first, first + length))
            assert not pages & free, f"run at {first} overlaps another"
            free |= pages
        assert len(self._first) == len(self._length), "a run has one start and one end"
        assert len(free) == self.num_pages, "the number of free pages is that of the runs"
        return free

    def _longest(self) -> tuple[int, int]:
        while True:
            negative, first = self._heap[0]
            if self._length.get(first) == -negative:
                return first, -negative
            heapq.heappop(self._heap)

    def _carve(self, first: int, offset: int, count: int) -> range:
        length = self._length.pop(first)
        del self._first[first + length - 1]
        start = first + offset
        self._put(first, offset)
        self._put(start + count, length - offset - count)
        self.num_pages -= count
        return range(start, start + count)

    def _put(self, first: int, length: int) -> None:
        if length > 0:
            self._length[first] = length
            self._first[first + length - 1] = first
            self._push(first)

    def _push(self, first: int) -> None:
        heapq.heappush(self._heap, (-self._length[first], first))
        if len(self._heap) > 2 * len(self._length) + _SLACK:
            self._heap = [(-length, first) for first, length in self._length.items()]
            heapq.heapify(self._heap)
