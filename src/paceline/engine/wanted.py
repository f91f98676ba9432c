"""Wanted: which parts of a merged drafter draft for which rows, where a request names one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from paceline.core.tree import EMPTY, Proposal

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.draft.base import DrafterSpec


class Lists(Protocol):
    """A part that proposes lists."""

    spec: DrafterSpec

    def propose(
        self, rows: Sequence[int], row_ids: Tensor, budgets: Sequence[int]
    ) -> Sequence[Proposal]:
        """Draft nodes, one proposal per row."""
        ...


class Wanted:
    """The rows' wishes; a row without one is drafted for by every part."""

    def __init__(self) -> None:
        self._only: dict[int, str] = {}

    def join(self, row: int, name: str | None) -> None:
        """A request has taken the row; `name`: of the only part that it wants."""
        if name is not None:
            self._only[row] = name

    def leave(self, row: int) -> None:
        """The row's request has left it."""
        self._only.pop(row, None)

    def wants(self, row: int, name: str) -> bool:
        """Whether a part of that name drafts for the row."""
        return self._only.get(row, name) == name

    def ask(
        self, part: Lists, rows: Sequence[int], row_ids: Tensor, budgets: Sequence[int]
    ) -> Sequence[Proposal]:
        """What a part proposes for the rows that want it; nothing for the others.

        Args:
            part: asked about those rows alone, and not at all if there are none.
            rows: B rows.
            row_ids: [B] int64, the same on the part's device; a part on the host does not look at it.
            budgets: most nodes of each row.

        Returns:
            One proposal per row.
        """
        at = [i for i, row in enumerate(rows) if self.wants(row, part.spec.name)]
        if len(at) == len(rows):
            return part.propose(rows, row_ids, budgets)
        found = [EMPTY] * len(rows)
        if at:
            ids = row_ids if part.spec.on_host else row_ids[at]
            said = part.propose([rows[i] for i in at], ids, [budgets[i] for i in at])
            for i, proposal in zip(at, said, strict=True):
                found[i] = proposal
        return found
