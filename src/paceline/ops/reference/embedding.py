"""Rows of a table: the definition."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Return the table's rows at token_ids: int64 of any shape, weight [V, H] -> [..., H]."""
    return functional.embedding(token_ids, weight)
