"""The pick's and the peaks' kernels: in Triton's interpreter, and what the host decides."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from paceline.ops.dispatch import explain
from paceline.sample.sampler import choose
from tests import pick_grid as grid
from tests.interpreter import linux, passes


@pytest.mark.slow
@linux
def test_the_kernels_in_the_interpreter() -> None:
    """They pick what `sample.sampler.choose` defines, as far as a CPU can tell."""
    passes("triton_pick")


@linux
@pytest.mark.parametrize("size", [1, 97, 49_152, 152_064, 1_000_003])
def test_parts_fill_the_device_and_cover_the_vocabulary(size: int) -> None:
    """One row must be read by every multiprocessor; many rows need no parts to be joined."""
    from paceline.ops.triton.pick import tiling_for

    for rows in (1, 8, 64, 441, 1024):
        tiling = tiling_for(rows, size, 132)
        assert tiling.part % tiling.block == 0
        assert tiling.block % 64 == 0
        parts = -(-size // tiling.part)
        assert parts <= max(8 * 132 // rows, 1)
        if rows == 1 and size > 132 * 1024:
            assert parts >= 132


def test_the_comparison_finds_what_is_wrong() -> None:
    """Other noise, another nucleus, a fault overlooked: only rounding is a reason to differ."""
    rows, size = len(grid.MIX), 300
    table = grid.table_of(grid.MIX, size, "cpu")
    nodes = grid.nodes_of(list(range(rows)), "cpu")
    logits = grid.logits_of("flat", rows, size, 0)
    right = choose(logits, nodes, table).tokens
    assert not grid.differences(right, logits, nodes, table)
    late = grid.nodes_of(list(range(rows)), "cpu", seed=1)
    assert len(grid.differences(choose(logits, late, table).tokens, logits, nodes, table)) > 5
    wider = [dataclasses.replace(p, top_p=min(1.0, p.top_p * 1.1)) for p in grid.MIX * 20]
    many = grid.nodes_of(list(range(20 * rows)), "cpu")
    logits = logits.repeat(20, 1)
    found = choose(logits, many, grid.table_of(wider, size, "cpu")).tokens
    assert grid.differences(found, logits, many, grid.table_of(grid.MIX * 20, size, "cpu"))
    logits = grid.logits_of("faults", rows, size, 0)
    found = choose(logits.nan_to_num(), nodes, table).tokens
    assert len(grid.differences(found, logits, nodes, table)) > 2


def test_what_doctor_says() -> None:
    """A GPU gets the kernels, float64 the definition, a CPU its own way."""
    for op in ("pick", "largest"):
        gpu = {c.name: c for c in explain(op, "cuda", torch.float32)}
        assert gpu["triton"].chosen == (importlib.util.find_spec("triton") is not None)
        assert not {c.name: c for c in explain(op, "cpu", torch.float32)}["triton"].chosen
        wide = {c.name: c for c in explain(op, "cuda", torch.float64)}
        assert wide["torch"].chosen
        assert "not for float64" in (wide["triton"].reason or "")
    assert explain("pick", "cpu", torch.float32)[0].chosen
