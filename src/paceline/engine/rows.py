"""RowTable: the device's permanent row per running request, and its only writer.

A row keeps what a step needs without asking the host: how many tokens are cached (`lens`), the
picked but uncached token (`next_token`, the root of the next tree), the page table and the sampling
options. Row R is a spare that padding points at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline import ops
from paceline.kv.pages import PageTable
from paceline.ops.reference.kv import slots_or_none
from paceline.ops.staged import sent
from paceline.sample.options import SamplingTable

if TYPE_CHECKING:
    from paceline.core.tree import DraftTree, Selection, Verdict
    from paceline.engine.proposers import Proposer
    from paceline.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Advanced:
    """What a verify step did for its rows. A path length."""

    emitted: Tensor  # [B, A] int64, -1 padded; NOT_FINITE after the last token of a failed row
    sources: Tensor  # [B, A] int8 which drafter proposed the path's nodes; 0 beyond its end
    drafted: Tensor  # [B] int64 draft nodes that were verified


class RowTable:
    """Per-row device state. Letters: R row capacity, B rows of a step, A path length.

    Implements the scheduler's `RowOwner`, so a row's tables and its drafter state change hands
    together.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        num_pages: int,
        pages_per_row: int,
        page_size: int,
        tail: int,
        vocab_size: int,
        num_option_slots: int,
        proposer: Proposer,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.device = device
        self.lens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)  # [R+1] cached
        self.next_token = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)  # [R+1]
        self.pages = PageTable(num_rows, pages_per_row, device, dummy_page=num_pages)
        self.options = SamplingTable(num_rows, vocab_size, device, num_option_slots)
        self._dummy_page = num_pages
        self._proposer = proposer
        self._tail_pages = -(-tail // page_size)
        self.num_pages = pages_per_row  # of a row that the coming step may look at, a host bound
        self._joined: dict[int, int] = {}  # row -> cached tokens, not yet on the device

    def apply(self) -> None:
        """Bring to the device what changed hands since the last step; before anything reads it."""
        self.options.apply()
        self.pages.apply()
        if self._joined:
            rows = sent(torch.tensor(list(self._joined)), self.device)
            self.lens[rows] = sent(torch.tensor(list(self._joined.values())), self.device)
            self._joined.clear()

    # -- RowOwner -----------------------------------------------------------------------------

    def can_join(self, sequence: Sequence) -> bool:
        """Whether an option slot is free, if this request's options need one."""
        return self.options.has_slot(sequence.request.params)

    def join(self, sequence: Sequence) -> None:
        """Set up the row of an admitted (or resumed) sequence."""
        request, row = sequence.request, sequence.row
        self._joined[row] = sequence.num_cached
        self.options.assign(
            row,
            request.params,
            seed=sequence.seed,
            sample_index=request.sample_index,
            prompt_ids=request.prompt_ids,
            output_ids=sequence.tokens[sequence.num_prompt :],
            stop_ids=sorted(request.stop_ids),
            limit=sequence.limit,
        )
        self._proposer.join(sequence)

    def leave(self, sequence: Sequence, *, finished: bool) -> None:
        """Clear the row before it is given to somebody else."""
        self._proposer.leave(sequence, finished=finished)
        self.options.release(sequence.row)
        self.pages.clear(sequence.row)

    def pages_added(self, sequence: Sequence, start: int) -> None:
        """Write new pages into the page table."""
        self.pages.assign(sequence.row, start, sequence.pages[start:])

    def bound(self, num_pages: int) -> int:
        """How many pages of a row a step looks at whose rows hold up to `num_pages`.

        A row that lacks pages for its tail drafts all the same, and looks for keys where it has none.
        """
        return min(num_pages + self._tail_pages, self.pages.tensor.shape[1])

    def page_table(self, rows: Tensor) -> Tensor:
        """[B, G] int32 page ids of rows [B], as many columns as the coming step needs."""
        return self.pages.tensor[rows, : self.num_pages]

    # -- inside a step ------------------------------------------------------------------------

    def slots(self, rows: Tensor, places: Tensor) -> Tensor:
        """Slot of each (row, place): both [T] int64; place p of a row is its p-th cache entry.

        A place without a page has slot -1: rows that lack pages would write over one another.
        """
        return slots_or_none(self.pages.tensor, rows, places, self.page_size, self._dummy_page)

    def commit_extend(self, rows: Tensor, lens: Tensor) -> None:
        """Rows [B] now have `lens` [B] cached tokens."""
        self.lens[rows] = lens

    def commit_first(self, rows: Tensor, tokens: Tensor, host_rows: list[int]) -> None:
        """The first picked token of new rows ([n]); it enters the counts of penalties.

        A row whose pick is NOT_FINITE lives no longer.
        """
        self.next_token[rows] = tokens.clamp(min=0)
        self.options.live[rows] = self.options.live[rows] & (tokens >= 0)
        self.options.commit(rows, tokens.view(-1, 1), host_rows)

    def restore_next(self, rows: Tensor, tokens: Tensor) -> None:
        """`next` of resumed rows: known already, never picked again, counted by `assign`."""
        self.next_token[rows] = tokens

    def commit_block(
        self,
        tree: DraftTree,
        chosen: Selection,
        rows: Tensor,
        verdict: Verdict,
        host_rows: list[int],
    ) -> Advanced:
        """Advance rows [B] by their accepted paths; dead rows (count 0) stay as they are."""
        emitted, sources, drafted = ops.advance(
            tree, chosen, verdict, rows, self.lens, self.next_token, self.options.live
        )
        self.options.commit(rows, emitted, host_rows)
        return Advanced(emitted=emitted, sources=sources, drafted=drafted)
