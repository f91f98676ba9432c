"""Kernels of drafter networks' candidates and trees in Triton's interpreter; run by tests/unit/ops.

Needs TRITON_INTERPRET=1 before Triton is imported, hence a process of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import triton

from tests import candidates_grid as grid

# NumPy warns where a GPU computes with NaN and infinities as a matter of course.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_the_interpreter_is_on() -> None:
    """Without it nothing here would run on a CPU."""
    assert triton.knobs.runtime.interpret


@pytest.mark.parametrize(
    "check, cases",
    [
        (grid.check_largest, 40),
        (grid.check_rank, 60),
        (grid.check_learn, 30),
        (grid.check_growth, 60),
        (grid.check_noise, 40),
        (grid.check_chain, 30),
        (grid.check_emitted, 30),
    ],
)
def test_kernels_are_the_definition(
    check: Callable[[random.Random, str], None], cases: int
) -> None:
    """Any shapes, ties, numbers that are none; trees bit for bit."""
    rng = random.Random(7)
    torch.manual_seed(7)
    for _ in range(cases):
        check(rng, "cpu")
