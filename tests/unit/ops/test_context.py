"""Context keys and values of all layers at once, as a CPU writes them: the definition."""

from __future__ import annotations

import pytest
import torch

from paceline.ops.context import context_write
from paceline.ops.reference.context import context_write as definition


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-13), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_all_layers_at_once(tokens: int, dtype: torch.dtype, rtol: float) -> None:
    """The same as layer by layer; where a token has no slot, only the dummy changes."""
    torch.manual_seed(0)
    layers, heads, dim = 3, 2, 16
    product = torch.randn(tokens, layers * 2 * heads * dim, dtype=dtype)
    turns = torch.arange(50)[:, None] * 10.0 ** -torch.arange(dim // 2)
    table = torch.cat((turns.cos(), turns.sin()), dim=1)
    positions = torch.randint(50, (tokens,))
    slots = torch.tensor([4, -1, 2, 9, 0, -1])[:tokens]
    gains = torch.randn(layers, dim)
    found, want = torch.zeros(2, 2, layers, heads, 12, dim, dtype=dtype)
    context_write(product, positions, table, slots, *found, gains, 1e-6)
    definition(product, positions, table, slots, *want, gains, 1e-6)
    torch.testing.assert_close(found[:, :, :, :-1], want[:, :, :, :-1], rtol=rtol, atol=rtol)
    assert tokens == 0 or want.abs().sum() > 0
