"""Rows of a table on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from paceline import ops
from tests.gpu_capture import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [24, 576, 4096, 5120])
@pytest.mark.parametrize("tokens", [0, 1, 16, 1000])
def test_rows_are_copied(tokens: int, width: int, dtype: torch.dtype) -> None:
    """A replay reads the ids that are there then."""
    table = torch.randn(3000, width, device="cuda").to(dtype)
    ids = torch.randint(3000, (tokens,), device="cuda")
    assert torch.equal(ops.embedding(ids, table), table[ids])
    if tokens:
        graph, found = captured(lambda: ops.embedding(ids, table))
        ids.fill_(2999)
        graph.replay()
        assert torch.equal(found, table[ids])


def test_far_rows() -> None:
    """Addresses beyond 32 bits."""
    table = torch.zeros(600_000, 4096, dtype=torch.bfloat16, device="cuda")
    table[599_999] = 3.0
    assert bool((ops.embedding(torch.tensor([599_999], device="cuda"), table) == 3).all())
