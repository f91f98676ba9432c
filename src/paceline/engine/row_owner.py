"""RowOwner: the scheduler's view of whoever keeps state per row."""

from __future__ import annotations

from typing import Protocol

from paceline.engine.sequence import Sequence


class RowOwner(Protocol):
    """Who is told when a row or its pages change hands (device tables, drafters)."""

    def join(self, sequence: Sequence) -> None:
        """`sequence` has just taken `sequence.row`."""
        ...

    def leave(self, sequence: Sequence, *, finished: bool) -> None:
        """`sequence` is about to lose its row; not finished: it will be resumed, or was aborted."""
        ...

    def pages_added(self, sequence: Sequence, start: int) -> None:
        """`sequence.pages[start:]` are new."""
        ...

    def can_join(self, sequence: Sequence) -> bool:
        """Whether scarce device state (option slots) is there for this sequence."""
        ...
