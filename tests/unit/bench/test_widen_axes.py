from __future__ import annotations

import pytest
import torch

from paceline.bench.widen_axes import SILENT, Axis, LayerAxes, Recipe, shares


def drawn(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("count", range(1, 40))
def test_shares_are_powers_of_two_that_sum_to_one(count: int) -> None:
    """A matrix that is divided into shares is divided without rounding, and none of it is lost."""
    found = shares(count)
    assert len(found) == count
    assert sum(found) == 1.0
    assert all(value.hex().split("p")[0] == "0x1.0000000000000" for value in found)
    assert max(found) <= 2 * min(found), "as equal as can be"


def test_what_reads_a_copied_dimension_sees_what_it_saw() -> None:
    """A matrix with shared columns times a copied vector is the old product, exactly in bfloat16."""
    axis = Axis.tiled(5, 23, 4)
    matrix = torch.randn(7, 5, generator=drawn()).bfloat16()
    grown = axis.shared(matrix, drawn())
    live = axis.source != SILENT
    summed = torch.zeros(7, 5, dtype=torch.float64)
    summed.index_add_(1, axis.source[live], grown[:, live].double())
    assert torch.equal(summed, matrix.double())
    vector = torch.randn(5, generator=drawn(), dtype=torch.float64)
    found = grown.double() @ axis.copied(vector, 0)
    torch.testing.assert_close(found, matrix.double() @ vector, rtol=0, atol=1e-12)


def test_silent_indices_are_zero_where_written_and_random_where_read() -> None:
    """A product over them sees real numbers in the matrix, and adds nothing."""
    axis = Axis.tiled(4, 11, 2)
    assert axis.num_silent == 3
    assert axis.live_share == pytest.approx(8 / 11)
    written = axis.copied(torch.ones(2, 4), 1)
    assert written[:, 8:].eq(0).all()
    assert written[:, :8].eq(1).all()
    matrix = torch.randn(50, 4, generator=drawn())
    read = axis.shared(matrix, drawn(3))[:, 8:]
    assert read.ne(0).all()
    assert 0.5 < read.std() / matrix.std() < 2
    assert torch.equal(read, axis.shared(matrix, drawn(3))[:, 8:]), (
        "the same seed, the same numbers"
    )


def test_repeated_axes_and_blocks_keep_their_parts_apart() -> None:
    """Tapped streams lie one after the other, and so do the rows of heads."""
    axis = Axis.tiled(2, 5, 2)
    assert axis.repeated(2).source.tolist() == [0, 1, 0, 1, -1, 2, 3, 2, 3, -1]
    assert axis.blocks(2).source.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, -1, -1]
    assert axis.blocks(2).share.tolist() == [0.5] * 8 + [0.0] * 2


@pytest.mark.parametrize("grown", [(9, 3), (64, 16), (63, 21), (20, 5), (12, 3)], ids=str)
def test_a_query_keeps_the_key_head_that_it_had(grown: tuple[int, int]) -> None:
    """In grouped-query attention each copy of a query head reads a copy of its own keys."""
    axes = LayerAxes.of(Axis.tiled(4, 8), (9, 3), grown, 1, Axis.tiled(2, 2))
    group = grown[0] // grown[1]
    for new, old in enumerate(axes.queries.source.tolist()):
        assert axes.keys.source[new // group] == old // 3
    assert set(axes.queries.source.tolist()) == set(range(9))


def test_zeros_are_counted_as_they_are() -> None:
    """The share of zeros that is told is that of the tensors."""
    axis = Axis.tiled(4, 11, 2)
    old = torch.randn(4, 4, generator=drawn())
    for recipe in (
        Recipe(copied={0: axis}, shared=Axis.tiled(4, 9)),
        Recipe(copied={1: axis}),
        Recipe(shared=axis),
        Recipe(copied={0: axis}, zero=True),
    ):
        made = recipe.make(old, torch.float32, "key")
        assert tuple(made.shape) == recipe.shape(old.shape)
        assert int(made.eq(0).sum()) == recipe.num_zeros(old.shape)
