"""The kernel that copies rows of a table in Triton's interpreter; run by tests/unit/ops/test_embedding.py.

Needs TRITON_INTERPRET=1 before Triton is imported, hence a process of its own.
"""

from __future__ import annotations

import pytest
import torch
import triton

from paceline.ops.reference.embedding import embedding as definition
from paceline.ops.triton.embedding import embedding
from tests.tree_grid import poisoned


def test_the_interpreter_is_on() -> None:
    """Without it nothing here would run on a CPU."""
    assert triton.knobs.runtime.interpret


@pytest.mark.parametrize("width", [1, 24, 576, 1536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_copied(width: int, dtype: torch.dtype) -> None:
    """Any number of ids, in any shape, also twice; a table that is part of a wider one; unknown ids."""
    wide = torch.randn(9, width + 3).to(dtype)
    for table in (wide[:, 1 : width + 1], wide[:, :width].contiguous(), wide.T[:9, :9]):
        for ids in (torch.tensor([0, 8, 8, 3]), torch.tensor([[5], [1]]), torch.zeros(0).long()):
            if ids.numel() and int(ids.max()) >= table.shape[0]:
                continue
            with poisoned():
                found = embedding(ids, table)
            assert torch.equal(found, definition(ids, table))
    assert embedding(torch.tensor([-1, 9, 2]), wide[:, :width]).isnan().all(1).tolist() == [
        True,
        True,
        False,
    ]


def test_training_gets_gradients() -> None:
    """From the definition."""
    table = torch.randn(4, 8, requires_grad=True)
    embedding(torch.tensor([1, 1]), table).sum().backward()
    assert table.grad is not None
    assert table.grad.sum(1).tolist() == [0.0, 16.0, 0.0, 0.0]
