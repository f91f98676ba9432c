"""Best-first growth of draft trees in one kernel, a program a row; the definition is `ops/reference/growth.py`.

Here it is the published heap (DDTree, arXiv 2604.12989), with a line of slots for a heap: a node costs a
maximum over the line.

Letters: B rows, P positions, C candidates, N nodes, W mask words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.core.tree import DraftTree, num_words
from paceline.ops.reference.growth import num_nodes
from paceline.ops.triton.growth_kernels import grow_kernel
from paceline.ops.triton.tree import block

if TYPE_CHECKING:
    from torch import Tensor


def best_first(
    roots: Tensor, ids: Tensor, on: Tensor, off: Tensor, budget: int, width: int, source: int
) -> DraftTree:
    """See `ops.reference.growth.best_first`."""
    rows, positions, count = ids.shape
    width = min(width, count, budget)
    nodes = num_nodes(positions, width, budget)
    dev = roots.device
    whole = torch.empty(3, rows, nodes, dtype=torch.int64, device=dev)
    mask = torch.empty(rows, nodes, num_words(nodes), dtype=torch.int64, device=dev)
    scores = torch.empty(rows, nodes, dtype=torch.float32, device=dev)
    sources = torch.empty(rows, nodes, dtype=torch.int8, device=dev)
    made = torch.empty(rows, dtype=torch.int64, device=dev)
    line = block(nodes - 1)
    with torch.cuda.device_of(whole):  # type: ignore[no-untyped-call]
        grow_kernel[rows,](
            roots.contiguous(),
            ids.contiguous(),
            on.contiguous(),
            off.contiguous(),
            *whole.unbind(),
            mask,
            scores,
            sources,
            made,
            positions,
            count,
            width,
            nodes,
            source,
            BLOCK=line,
            BLOCK_N=block(nodes),
            WORDS=num_words(nodes),
            num_warps=1,
        )
    return DraftTree(
        token_ids=whole[0],
        parents=whole[1],
        depths=whole[2],
        mask=mask,
        scores=scores,
        sources=sources,
        num_nodes=made,
    )
