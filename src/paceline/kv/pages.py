"""Who owns which page: `PageAllocator` on the host, `PageTable` on the device.

A page is in one of three states:

    free    nobody owns it, nothing in it can be found
    in use  one or more owners (a row that writes it, rows that share it as a prefix)
    cached  no owner, but findable through the prefix cache; evicted when `allocate` needs it

Not here: the tensors (`kv/pool.py`), which prefixes are findable (`kv/prefix.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from paceline.core.errors import PacelineError
from paceline.kv.runs import FreeRuns
from paceline.ops.staged import StagedTable

if TYPE_CHECKING:
    from collections.abc import Sequence


class OutOfPagesError(PacelineError, RuntimeError):
    """More pages were asked for than are free or can be evicted; nothing was allocated.

    The scheduler answers it by waiting or by preempting a row; a user sees it only if one request
    alone does not fit the pool.
    """


class PageKeeper(Protocol):
    """Whoever wants to keep pages that have lost their last owner: the prefix cache."""

    @property
    def num_cached(self) -> int:
        """Pages kept without an owner."""
        ...

    def park(self, page: int) -> bool:
        """The page lost its last owner. True: it is kept (cached); False: it is free."""
        ...

    def unpark(self, page: int) -> None:
        """The cached page has an owner again."""
        ...

    def evict(self, count: int) -> list[int]:
        """Give up exactly `count` cached pages (at most `num_cached`), least recently used first."""
        ...

    def check(self, refs: Sequence[int]) -> None:
        """Assert the keeper's invariants, given every page's number of owners."""
        ...


class PageAllocator:
    """Hands out pages 0 ... num_pages - 1 and counts their owners. Host only, one writer.

    Every operation costs O(pages touched), up to a logarithm of the number of free runs.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0, "an allocator has at least one page"
        self.num_pages = num_pages
        self._refs = [0] * num_pages
        self._free = FreeRuns(num_pages)
        self._keeper: PageKeeper | None = None

    def attach(self, keeper: PageKeeper) -> None:
        """Let `keeper` keep pages that lose their last owner. Called once, by the keeper."""
        assert self._keeper is None, "an allocator has one keeper"
        self._keeper = keeper

    @property
    def num_free(self) -> int:
        """Pages without owner and without content."""
        return self._free.num_pages

    @property
    def num_cached(self) -> int:
        """Pages without owner that the prefix cache can still find."""
        return 0 if self._keeper is None else self._keeper.num_cached

    @property
    def num_available(self) -> int:
        """Most pages that one `allocate` can return now: free and cached."""
        return self.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        """Pages with at least one owner."""
        return self.num_pages - self.num_available

    def num_owners(self, page: int) -> int:
        """How many owners a page has."""
        return self._refs[page]

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Return `count` pages owned once, in the order in which the row should use them.

        One consecutive run if there is one, else as few runs as possible: attention reads a run of
        pages as one view. Cached pages are evicted only if the free ones do not suffice.

        Args:
            count: how many; 0 is allowed.
            after: the row's last page, if it has one. The pages that follow it are preferred, so
                that a row which grows page by page stays one run.

        Raises:
            OutOfPagesError: fewer than `count` are available; nothing was changed.
        """
        if count > self.num_available:
            msg = (
                f"{count} KV pages were asked for; {self.num_free} are free and "
                f"{self.num_cached} can be evicted, of {self.num_pages}. Wait for a request to "
                f"finish, preempt one, or give the pool more pages"
            )
            raise OutOfPagesError(msg)
        short = count - self.num_free
        if short > 0:
            assert self._keeper is not None, "pages beyond the free ones come from the keeper"
            self._free.give(self._keeper.evict(short))
        pages = self._free.take(count, after)
        for page in pages:
            self._refs[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """Add one owner to each page; a cached page is in use again."""
        for page in pages:
            if self._refs[page] == 0:
                assert self._keeper is not None, f"page {page} is free: nothing to retain"
                self._keeper.unpark(page)
            self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Take one owner from each page. Pages that lose their last one become cached or free.

        Give a row's pages in the row's order: its last page then counts as the least recently
        used, so that a prefix outlives what follows it.
        """
        freed: list[int] = []
        for page in reversed(pages):
            assert self._refs[page] > 0, f"page {page} was released more often than retained"
            self._refs[page] -= 1
            if self._refs[page] == 0 and not (self._keeper and self._keeper.park(page)):
                freed.append(page)
        self._free.give(freed)

    def check_integrity(self, holders: Sequence[Sequence[int]]) -> None:
        """Assert that the books agree with the world; for tests and for idle moments in service.

        Args:
            holders: one list of pages per owner: every row's, and any other's.
        """
        held = [0] * self.num_pages
        for pages in holders:
            assert len(set(pages)) == len(pages), "an owner holds a page once"
            for page in pages:
                held[page] += 1
        wrong = [p for p in range(self.num_pages) if held[p] != self._refs[p]]
        assert not wrong, f"owner counts of pages {wrong[:8]} differ from their holders"
        free = self._free.check()
        taken = [p for p in free if held[p]]
        assert not taken, f"pages {taken[:8]} are free and held"
        used = sum(1 for count in held if count)
        assert len(free) + used + self.num_cached == self.num_pages, (
            f"{len(free)} free + {used} used + {self.num_cached} cached != {self.num_pages}"
        )
        if self._keeper is not None:
            self._keeper.check(self._refs)


class PageTable:
    """Which pages each row's sequence lies in, on the device.

    Attributes:
        tensor: [R+1, G] int32, up to date after `apply`. Place p of row r lies in page
            tensor[r, p // page_size]. Row R is for padding; it, and every entry that was not
            assigned, points at the dummy page.
    """

    def __init__(
        self, num_rows: int, pages_per_row: int, device: torch.device | str, *, dummy_page: int
    ) -> None:
        self.dummy_page = dummy_page
        self._table = StagedTable(
            torch.full((num_rows + 1, pages_per_row), dummy_page, dtype=torch.int32), device
        )
        self.tensor = self._table.tensor

    def assign(self, row: int, start: int, pages: Sequence[int]) -> None:
        """Let entries start, start + 1, ... of a row be `pages`."""
        stop = start + len(pages)
        rows, width = self._table.host.shape
        assert 0 <= row < rows - 1, f"row {row} does not exist or is the padding row"
        assert 0 <= start <= stop <= width, f"{stop} pages do not fit a row of {width}"
        self._table.host[row, start:stop] = torch.tensor(pages, dtype=torch.int32)
        self._table.touch(row)

    def clear(self, row: int) -> None:
        """Point all of a row's entries at the dummy page."""
        self._table.host[row].fill_(self.dummy_page)
        self._table.touch(row)

    def apply(self) -> None:
        """Bring what was assigned and cleared to the device, before a step reads it."""
        self._table.apply()
