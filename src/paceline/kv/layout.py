"""What one cached token holds. Facts about shapes only; the tensors are in `kv/pool.py`.

Letters: L layers, Hkv key/value heads on this rank, S slots, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Heads:
    """One key and one value vector of `head_dim` numbers for each of `num_heads` heads.

    Multi-head and grouped-query attention alike: `num_heads` counts key/value heads.
    """

    num_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        assert self.num_heads > 0, "a layout has at least one head"
        assert self.head_dim > 0, "a head has at least one number"

    def token_nbytes(self, num_layers: int, dtype: torch.dtype) -> int:
        """Bytes that one token takes in a pool of `num_layers` layers, keys and values together."""
        return 2 * num_layers * self.num_heads * self.head_dim * dtype.itemsize


KVLayout = Heads  # a union, once there is a second layout (latent attention)
