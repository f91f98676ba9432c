"""Kernels of a verify step's bookkeeping in Triton's interpreter; run by tests/unit/ops/test_triton_tree.py.

Needs TRITON_INTERPRET=1 before Triton is imported, hence a process of its own.
"""

from __future__ import annotations

import random

import pytest
import torch
import triton

from tests import tree_grid as grid


def test_the_interpreter_is_on() -> None:
    """Without it nothing here would run on a CPU."""
    assert triton.knobs.runtime.interpret


@pytest.mark.parametrize("seed", range(4))
def test_small_steps(seed: int) -> None:
    """Select, walk, move and commit of any trees: caps, padding, ties, ends, missing pages."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(60):
        grid.run(grid.random_step(rng), rng, "cpu")


@pytest.mark.parametrize("most", [62, 63, 64, 65, 130, 255])
def test_masks_of_many_words(most: int) -> None:
    """Ancestor bits cross words, and the sign bit is a bit like any other."""
    rng = random.Random(most)
    torch.manual_seed(most)
    for _ in range(3):
        grid.run(grid.random_step(rng, most=most, rows=3), rng, "cpu")
