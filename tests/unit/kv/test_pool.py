"""KVPool: what is written where, and moves that overlap."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.kv.layout import Heads
from paceline.kv.pool import KVPool

LAYERS, HEADS, DIM, PAGES, SIZE = 2, 3, 4, 3, 4


def make_pool(dtype: torch.dtype = torch.float64) -> KVPool:
    """A pool whose every number is different."""
    pool = KVPool(Heads(HEADS, DIM), LAYERS, PAGES, SIZE, dtype, "cpu")
    pool.k.copy_(torch.arange(pool.k.numel()).view_as(pool.k))
    pool.v.copy_(-torch.arange(pool.v.numel()).view_as(pool.v))
    return pool


def test_sizes_count_the_dummy_page() -> None:
    """The memory budget must be reckoned with the page that is only padding."""
    pool = make_pool(torch.bfloat16)
    assert pool.k.shape == pool.v.shape == (LAYERS, HEADS, (PAGES + 1) * SIZE, DIM)
    assert pool.num_slots == 16
    assert pool.dummy_page == PAGES
    assert pool.nbytes == 16 * Heads(HEADS, DIM).token_nbytes(LAYERS, torch.bfloat16)
    assert pool.nbytes == 2 * LAYERS * HEADS * 16 * DIM * 2


def test_a_layout_has_heads_and_numbers() -> None:
    """An empty layout would make pools of no bytes, and a division by zero in sizing."""
    with pytest.raises(AssertionError, match="at least one head"):
        Heads(0, 4)
    with pytest.raises(AssertionError, match="at least one number"):
        Heads(1, 0)


def test_write_goes_to_its_slots_of_its_layer_and_nowhere_else() -> None:
    """A token's entry must not land in another row's page or another layer."""
    pool = make_pool()
    before_k, before_v = pool.k.clone(), pool.v.clone()
    k, v = torch.rand(3, HEADS, DIM), torch.rand(3, HEADS, DIM)
    pool.write(1, torch.tensor([5, 0, 11]), k, v)
    for t, slot in enumerate([5, 0, 11]):
        assert torch.equal(pool.k[1, :, slot], k[t].double())
        assert torch.equal(pool.v[1, :, slot], v[t].double())
        before_k[1, :, slot], before_v[1, :, slot] = k[t], v[t]
    assert torch.equal(pool.k, before_k)
    assert torch.equal(pool.v, before_v)


def test_write_to_minus_one_changes_no_page_that_anybody_owns() -> None:
    """Dead tokens carry garbage, NaN included; it may only reach the dummy page."""
    pool = make_pool()
    before = pool.k.clone()
    nan = torch.full((4, HEADS, DIM), torch.nan)
    pool.write(0, torch.tensor([-1, -1, 2, -1]), nan, nan)
    owned = PAGES * SIZE
    kept = torch.arange(owned) != 2
    assert pool.k[0, :, 2].isnan().all()
    assert torch.equal(pool.k[0, :, :owned][:, kept], before[0, :, :owned][:, kept])
    assert torch.equal(pool.k[1], before[1])


def test_write_rounds_to_the_pool_dtype() -> None:
    """A float32 layer may feed a bfloat16 pool."""
    pool = make_pool(torch.bfloat16)
    k = torch.rand(1, HEADS, DIM)
    pool.write(0, torch.tensor([3]), k, k)
    assert torch.equal(pool.k[0, :, 3], k[0].to(torch.bfloat16))


def test_move_reads_everything_before_it_writes() -> None:
    """An accepted path [0, 2, 3] becomes [0, 1, 2]: slot 2 is read, and written, in one move."""
    pool = make_pool()
    k, v = pool.k.clone(), pool.v.clone()
    pool.move(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 2]))
    assert torch.equal(pool.k[:, :, [0, 1, 2]], k[:, :, [0, 2, 3]])
    assert torch.equal(pool.v[:, :, [0, 1, 2]], v[:, :, [0, 2, 3]])
    assert torch.equal(pool.k[:, :, 3:], k[:, :, 3:])


def test_move_can_turn_a_row_round() -> None:
    """A cycle has no order of copies that works in place."""
    pool = make_pool()
    k = pool.k.clone()
    pool.move(torch.tensor([4, 5, 6]), torch.tensor([6, 4, 5]))
    assert torch.equal(pool.k[:, :, [6, 4, 5]], k[:, :, [4, 5, 6]])


def test_a_move_to_nowhere_touches_no_memory() -> None:
    """A chain's path is in place already: its move, made in every step, must cost nothing."""
    pool = make_pool()
    before = pool.k._version
    pool.move(torch.tensor([4, 5, -1, 7]), torch.tensor([4, 5, 6, -1]))
    pool.move(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert pool.k._version == before


@given(data=st.data())
def test_moves_equal_a_copy_through_fresh_memory(data: st.DataObject) -> None:
    """Any paths, -1 on either side, several rows at once: as if reads preceded writes."""
    pool = make_pool()
    owned = PAGES * SIZE
    n = data.draw(st.integers(0, 6))
    src = data.draw(st.lists(st.integers(-1, owned - 1), min_size=n, max_size=n))
    dst = data.draw(st.lists(st.integers(0, owned - 1), min_size=n, max_size=n, unique=True))
    dst = [-1 if data.draw(st.booleans()) else d for d in dst]
    k, v = pool.k.clone(), pool.v.clone()
    want_k, want_v = k.clone(), v.clone()
    for s, d in zip(src, dst, strict=True):
        if s >= 0 and d >= 0:
            want_k[:, :, d], want_v[:, :, d] = k[:, :, s], v[:, :, s]
    pool.move(torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64))
    assert torch.equal(pool.k[:, :, :owned], want_k[:, :, :owned])
    assert torch.equal(pool.v[:, :, :owned], want_v[:, :, :owned])
