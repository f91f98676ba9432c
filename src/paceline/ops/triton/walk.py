"""After the target's pass: judge the trees, advance the rows, and gather the accepted paths, a kernel each.

The definitions are in `ops/reference/verify.py`.

Letters: B rows, N nodes a tree, T selected nodes, A path length, R row capacity, G pages a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.core.tree import NOT_FINITE, Verdict
from paceline.ops.triton.tree import block, warps
from paceline.ops.triton.walk_kernels import advance_kernel, compact_kernel, judge_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.tree import DraftTree, Selection
    from paceline.ops.reference.verify import Six

_DEAD = 128  # dead entries that a program fills at once


def judge(
    tree: DraftTree,
    selection: Selection,
    picks: Tensor,
    rows: Tensor,
    lens: Tensor,
    live: Tensor,
    stop_ids: Tensor,
    limits: Tensor,
) -> Verdict:
    """See `ops.reference.verify.judge`."""
    batch, width = tree.token_ids.shape
    dev = picks.device
    paths = torch.empty(2, batch, width, dtype=torch.int64, device=dev)
    own = torch.empty(2, batch, dtype=torch.int64, device=dev)
    alive = torch.empty(batch, dtype=torch.bool, device=dev)
    block_n = block(width)
    with torch.cuda.device_of(paths):  # type: ignore[no-untyped-call]
        judge_kernel[batch,](
            tree.token_ids,
            tree.parents,
            selection.node,
            selection.cu_q,
            picks.contiguous(),
            rows.contiguous(),
            lens.contiguous(),
            live.view(torch.int8),
            stop_ids,
            limits,
            *paths.unbind(),
            *own.unbind(),
            alive.view(torch.int8),
            selection.node.shape[0],
            live.shape[0] - 1,
            tree.token_ids.stride(0),
            tree.token_ids.stride(1),
            tree.parents.stride(0),
            tree.parents.stride(1),
            limits.stride(0),
            WIDTH=width,
            BLOCK_N=block_n,
            STOPS=stop_ids.shape[1],
            NOT_FINITE=NOT_FINITE,
            num_warps=warps(block_n),
        )
    return Verdict(
        path=paths[0], path_tokens=paths[1], count=own[0], next_token=own[1], alive=alive
    )


def advance(
    tree: DraftTree,
    selection: Selection,
    verdict: Verdict,
    rows: Tensor,
    lens: Tensor,
    next_token: Tensor,
    live: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.reference.verify.advance`."""
    batch, width = verdict.path.shape
    emitted = torch.empty_like(verdict.path)
    sources = torch.empty(batch, width, dtype=torch.int8, device=emitted.device)
    drafted = torch.empty(batch, dtype=torch.int64, device=emitted.device)
    block_a = block(width)
    with torch.cuda.device_of(emitted):  # type: ignore[no-untyped-call]
        advance_kernel[batch,](
            verdict.path.contiguous(),
            verdict.path_tokens.contiguous(),
            verdict.count,
            verdict.next_token,
            verdict.alive.view(torch.int8),
            selection.node,
            selection.cu_q,
            tree.sources,
            rows.contiguous(),
            lens,
            next_token,
            live.view(torch.int8),
            emitted,
            sources,
            drafted,
            selection.node.shape[0],
            lens.shape[0] - 1,
            width,
            tree.token_ids.shape[1],
            tree.sources.stride(0),
            tree.sources.stride(1),
            BLOCK_A=block_a,
            num_warps=1,  # what a row's state was is read before it is written
        )
    return emitted, sources, drafted


def compact(
    verdict: Verdict,
    emitted: Tensor,
    cu_q: Tensor,
    rows: Tensor,
    lens: Tensor,
    pages: Tensor,
    *,
    capacity: int,
    page_size: int,
    dummy_page: int,
) -> Six:
    """See `ops.reference.verify.compact`."""
    batch, width = verdict.path.shape
    cu = torch.empty_like(cu_q)
    out = torch.empty(5, capacity, dtype=torch.int64, device=cu.device)
    block_a = block(width)
    with torch.cuda.device_of(cu):  # type: ignore[no-untyped-call]
        compact_kernel[batch,](
            verdict.path.contiguous(),
            verdict.path_tokens.contiguous(),
            verdict.count,
            emitted,
            cu_q,
            rows.contiguous(),
            lens.contiguous(),
            pages,
            cu,
            *out.unbind(),
            batch,
            capacity,
            pages.shape[0] - 1,
            width,
            pages.stride(0),
            pages.shape[1],
            dummy_page,
            PAGE=page_size,
            BLOCK_A=block_a,
            BLOCK_B=block(batch),
            DEAD=_DEAD,
            num_warps=warps(block_a),
        )
    return cu, out[0], out[1], out[2], out[3], out[4]
