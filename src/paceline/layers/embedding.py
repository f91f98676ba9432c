"""Embedding and Head: the token table and the projection to logits, tied or not.

A tied model has no Head: `Embedding.logits` uses the table itself, packed or not, so a packed tied
table is stored once and serves both ends.

Letters: T tokens, M picked positions, V vocabulary, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline import ops
from paceline.layers.linear import Matrix


class Embedding(Matrix):
    """The [V, H] token table.

    Args:
        vocab_size: V.
        hidden_size: H.
        dtype: of the parameter.
        device: where it lives.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__((vocab_size,), hidden_size, dtype=dtype, device=device)

    if TYPE_CHECKING:  # nn.Module's own returns Any

        def __call__(self, token_ids: Tensor) -> Tensor:
            """See `forward`."""

    def forward(self, token_ids: Tensor) -> Tensor:
        """Rows of the table: [T] int64 to [T, H]."""
        return ops.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """The table as a head: [M, H] to [M, V] float32 (or hidden's dtype if that is wider)."""
        return ops.linear_f32(hidden, self.weight)


class Head(Matrix):
    """The [V, H] projection to logits of a model that does not tie it to the embedding.

    Args:
        vocab_size: V.
        hidden_size: H.
        dtype: of the parameter.
        device: where it lives.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__((vocab_size,), hidden_size, dtype=dtype, device=device)

    if TYPE_CHECKING:  # nn.Module's own returns Any

        def __call__(self, hidden: Tensor) -> Tensor:
            """See `forward`."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[M, H] to [M, V] float32 (or hidden's dtype if that is wider)."""
        return ops.linear_f32(hidden, self.weight)
