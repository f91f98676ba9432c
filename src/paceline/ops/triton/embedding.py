"""Rows of a table on a GPU: a program copies a token's row, or 1,024 numbers of it.

PyTorch serves up to 16 tokens with a kernel whose programs go through them one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.ops.cpu.native import needs_grad
from paceline.ops.reference import embedding as reference
from paceline.ops.triton.embedding_kernels import rows_kernel
from paceline.ops.triton.sizes import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

_COLUMNS = 1024  # of a program


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """See `ops.reference.embedding.embedding`; an id that the table lacks gives NaN."""
    if torch.compiler.is_compiling() or needs_grad(weight) or weight.stride(1) != 1:
        return reference.embedding(token_ids, weight)
    size, width = weight.shape
    out = torch.empty(*token_ids.shape, width, dtype=weight.dtype, device=weight.device)
    if out.numel() == 0:
        return out
    block = min(_COLUMNS, power_of_two(width))
    with torch.cuda.device_of(weight):  # type: ignore[no-untyped-call]
        rows_kernel[(token_ids.numel(), -(-width // block))](
            token_ids.contiguous(),
            weight,
            out,
            size,
            weight.stride(0),
            WIDTH=width,
            BLOCK=block,
            num_warps=4,
        )
    return out
