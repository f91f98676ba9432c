"""Slots of places: how a page table is read."""

from __future__ import annotations

import torch

from paceline.ops.reference.kv import slots_of


def test_places_are_found_through_the_page_table() -> None:
    """A row's sequence is in order of its pages, wherever these are in the pool."""
    pages = torch.tensor([[7, 2, 9], [0, 1, 9]], dtype=torch.int32)
    rows = torch.tensor([0, 0, 0, 1, 1])
    places = torch.tensor([0, 3, 4, 5, 7])
    assert slots_of(pages, rows, places, 4).tolist() == [28, 31, 8, 5, 7]
    assert slots_of(pages, rows, places, 4).dtype == torch.int64


def test_rows_and_places_broadcast() -> None:
    """All keys of all rows are found in one call."""
    pages = torch.tensor([[1, 0], [2, 3]], dtype=torch.int32)
    rows, places = torch.arange(2)[:, None], torch.arange(4)[None]
    assert slots_of(pages, rows, places, 2).tolist() == [[2, 3, 0, 1], [4, 5, 6, 7]]


def test_a_slot_number_does_not_overflow_32_bits() -> None:
    """The table is int32, slots of a large pool are not."""
    pages = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    slot = slots_of(pages, torch.tensor([0]), torch.tensor([5]), 16)
    assert slot.item() == (2**31 - 1) * 16 + 5


def test_a_place_beyond_the_table_reads_the_last_page() -> None:
    """Padding asks for places that no row has; that must not be an index error."""
    pages = torch.tensor([[1, 4]], dtype=torch.int32)
    assert slots_of(pages, torch.tensor([0]), torch.tensor([11]), 2).item() == 9
