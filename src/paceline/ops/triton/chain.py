"""A chain of first choices, and what was emitted in its place, a kernel each.

The definitions are `ops/reference/chain.py`.

Letters: B rows, P positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.ops.triton.chain_kernels import chain_kernel, emitted_kernel
from paceline.ops.triton.tree import block

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 32  # of a program


def chain(roots: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """See `ops.reference.chain.chain`."""
    rows, positions, _ = ids.shape
    tokens = torch.empty(rows, 1 + positions, dtype=torch.int64, device=ids.device)
    scores = torch.empty(rows, 1 + positions, dtype=torch.float32, device=ids.device)
    with torch.cuda.device_of(tokens):  # type: ignore[no-untyped-call]
        chain_kernel[(-(-rows // _ROWS),)](
            roots,
            ids,
            weights,
            tokens,
            scores,
            rows,
            roots.stride(0),
            ids.stride(0),
            ids.stride(1),
            weights.stride(0),
            weights.stride(1),
            POSITIONS=positions,
            ROWS=_ROWS,
            num_warps=1,
        )
    return tokens, scores


def emitted(cu: Tensor, next_ids: Tensor, positions: int) -> Tensor:
    """See `ops.reference.chain.emitted`."""
    rows = cu.shape[0] - 1
    out = torch.empty(rows, positions, dtype=torch.int64, device=cu.device)
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        emitted_kernel[(rows,)](
            cu.contiguous(),
            next_ids.contiguous(),
            out,
            next_ids.shape[0],
            POSITIONS=positions,
            BLOCK=block(positions),
            num_warps=1,
        )
    return out
