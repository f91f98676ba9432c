"""Linear: a matrix product whose weight is a parameter or, after packing, codes.

Fused projections (QKV, gate and up) are one matrix with the parts' rows one after the other;
`splits` holds the parts' sizes, so that the weight table can be read in both directions.

Not here: how the product is computed (`ops`), and where weights come from (`models/weights.py`).

Letters: T tokens, K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline import ops
from paceline.ops.packed import PackedWeight


class Matrix(nn.Module):
    """A module with one [N, K] weight that may be exchanged for a packed one.

    Args:
        splits: rows of each fused part; N is their sum.
        in_features: K.
        dtype: of the parameter.
        device: where it lives; "meta" until a checkpoint is loaded.
    """

    weight: Tensor | PackedWeight

    def __init__(
        self,
        splits: Sequence[int],
        in_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.splits = tuple(splits)
        self.in_features = in_features
        self.out_features = sum(self.splits)
        shape = (self.out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

    def set_weight(self, weight: Tensor | PackedWeight) -> None:
        """Take a weight of the same shape, packed or not; loaded weights need no gradient.

        Args:
            weight: [N, K] tensor, or a packed weight of that shape.
        """
        assert tuple(weight.shape) == (self.out_features, self.in_features), "weight must be [N, K]"
        # nn.Module keeps parameters apart from plain attributes and refuses to mix the two.
        delattr(self, "weight")
        self.weight = (
            nn.Parameter(weight, requires_grad=False) if isinstance(weight, Tensor) else weight
        )

    @property
    def nbytes(self) -> int:
        """Bytes that the weight takes."""
        return self.weight.nbytes

    def extra_repr(self) -> str:
        """Shape and, if packed, how."""
        kind = "" if isinstance(self.weight, Tensor) else f", {type(self.weight).__name__}"
        return f"{self.splits} x {self.in_features}{kind}"


class Linear(Matrix):
    """x @ weight.T + bias, with parts of the output fused row by row.

    Args:
        in_features: K.
        splits: rows of each fused part; one number for a plain projection.
        bias: add a learned [N].
        dtype: of the parameters.
        device: where they live.
    """

    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        *splits: int,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(splits, in_features, dtype=dtype, device=device)
        if bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, dtype=dtype, device=device))
        else:
            self.register_parameter("bias", None)

    if TYPE_CHECKING:  # nn.Module's own returns Any

        def __call__(self, x: Tensor) -> Tensor:
            """See `forward`."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, K] to [T, N], in x's dtype."""
        return ops.linear(x, self.weight, self.bias)
