"""Select the nodes of a verify step, and say what its pass is told, in a kernel or four.

    T covers all nodes      place                        every program counts the rows before its own
    it does not             eligible, choose, place      keys; who is among the batch's best T; where to
    then                    inputs, pick_places          token ids, positions, slots; where to pick

The order of `select` (score, then flat index) is that of a rank: how many nodes of the batch stand before
this one. It is counted, by comparing all with all, not sorted: the usual few hundred nodes are nothing to a
GPU, and 16 thousand, the most, are 268 million comparisons.

The definitions are `ops/reference/tree.py` and `ops/reference/verify.py`.

Letters: B rows, N nodes a tree, T selected nodes, W mask words, R row capacity, G pages a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.core.tree import Selection
from paceline.ops.triton.sizes import power_of_two
from paceline.ops.triton.tree_kernels import (
    choose_kernel,
    draft_inputs_kernel,
    eligible_kernel,
    inputs_kernel,
    pick_places_kernel,
    place_kernel,
)

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.tree import DraftTree
    from paceline.ops.reference.verify import Six

_LEAST = 16  # what a block holds at least
_DEAD = 128  # dead entries that a program fills at once
_COLUMNS = 64  # nodes of the batch that a row's are compared with at once
_BLOCK = 128  # selected nodes a program


def block(count: int) -> int:
    """Size of a block that holds `count` numbers: a power of two."""
    return max(_LEAST, power_of_two(count))


def warps(count: int) -> int:
    """Warps of a program that works on a block of `count` numbers."""
    if count <= 64:
        return 1
    return 4 if count <= 128 else 8  # Triton 3.6 can't compile `place_kernel` for 256 with 4


def select(tree: DraftTree, rows: Tensor, num_tokens: int, caps: Tensor) -> Selection:
    """See `ops.reference.tree.select`; always T entries."""
    (batch, width), words = tree.token_ids.shape, tree.mask.shape[2]
    dev, scores, nodes = tree.token_ids.device, tree.scores, tree.num_nodes
    rows, caps = rows.contiguous(), caps.contiguous()
    node = torch.empty(num_tokens, dtype=torch.int64, device=dev)
    cu_q = torch.empty(batch + 1, dtype=torch.int64, device=dev)
    mask = torch.empty(num_tokens, words, dtype=torch.int64, device=dev)
    cut = num_tokens < batch * width
    chosen = kept = cu_q  # kernels take pointers: one that is not used may be anything
    block_n = block(width)
    with torch.cuda.device_of(node):  # type: ignore[no-untyped-call]
        if cut:
            keys = torch.empty(batch, width, dtype=torch.float32, device=dev)
            chosen = torch.empty(batch, width, dtype=torch.int8, device=dev)
            kept = torch.empty(batch, dtype=torch.int64, device=dev)
            eligible_kernel[batch,](
                scores,
                nodes,
                rows,
                caps,
                keys,
                batch,
                scores.stride(0),
                scores.stride(1),
                nodes.stride(0),
                WIDTH=width,
                BLOCK_N=block_n,
                num_warps=warps(block_n),
            )
            choose_kernel[batch,](
                keys,
                chosen,
                kept,
                batch,
                num_tokens,
                WIDTH=width,
                BLOCK_N=block_n,
                COLUMNS=_COLUMNS,
                num_warps=4,
            )
        place_kernel[batch,](
            scores,
            nodes,
            tree.mask,
            rows,
            caps,
            chosen,
            kept,
            node,
            cu_q,
            mask,
            batch,
            num_tokens,
            scores.stride(0),
            scores.stride(1),
            tree.mask.stride(0),
            tree.mask.stride(1),
            tree.mask.stride(2),
            nodes.stride(0),
            CUT=cut,
            WIDTH=width,
            BLOCK_N=block_n,
            WORDS=words,
            BLOCK_B=block(batch),
            DEAD=_DEAD,
            num_warps=warps(block_n),
        )
    return Selection(node=node, cu_q=cu_q, mask=mask)


def verify_inputs(
    tree: DraftTree,
    selection: Selection,
    rows: Tensor,
    lens: Tensor,
    pages: Tensor,
    *,
    page_size: int,
    dummy_page: int,
    num_pages: int,
) -> Six:
    """See `ops.reference.verify.verify_inputs`."""
    (batch, width), num_tokens = tree.token_ids.shape, selection.node.shape[0]
    dev = selection.node.device
    flat = torch.empty(3, num_tokens, dtype=torch.int64, device=dev)
    own = torch.empty(2, batch, dtype=torch.int64, device=dev)
    num_pages = min(num_pages, pages.shape[1])
    table = torch.empty(batch, num_pages, dtype=torch.int32, device=dev)
    block_n = block(width)
    with torch.cuda.device_of(flat):  # type: ignore[no-untyped-call]
        inputs_kernel[batch,](
            tree.token_ids,
            tree.depths,
            selection.node,
            selection.cu_q,
            rows.contiguous(),
            lens,
            pages,
            *flat.unbind(),
            *own.unbind(),
            table,
            batch,
            num_tokens,
            lens.shape[0] - 1,
            pages.stride(0),
            pages.shape[1],
            num_pages,
            dummy_page,
            tree.token_ids.stride(0),
            tree.token_ids.stride(1),
            tree.depths.stride(0),
            tree.depths.stride(1),
            PAGE=page_size,
            WIDTH=width,
            BLOCK_N=block_n,
            DEAD=_DEAD,
            num_warps=warps(block_n),
        )
    return flat[0], flat[1], flat[2], own[0], own[1], table


def draft_inputs(
    rows: Tensor,
    lens: Tensor,
    pages: Tensor,
    *,
    width: int,
    offset: int,
    ahead: int | None,
    tail: int,
    page_size: int,
    dummy_page: int,
    num_pages: int,
) -> Six:
    """See `ops.reference.verify.draft_inputs`."""
    batch, dev = rows.shape[0], rows.device
    flat = torch.empty(2, batch * width, dtype=torch.int64, device=dev)
    own = torch.empty(2, batch, dtype=torch.int64, device=dev)
    cu_q = torch.empty(batch + 1, dtype=torch.int64, device=dev)
    num_pages = min(num_pages, pages.shape[1])
    table = torch.empty(batch, num_pages, dtype=torch.int32, device=dev)
    with torch.cuda.device_of(flat):  # type: ignore[no-untyped-call]
        draft_inputs_kernel[batch,](
            rows.contiguous(),
            lens,
            pages,
            flat[0],
            flat[1],
            own[0],
            cu_q,
            own[1],
            table,
            batch,
            lens.shape[0] - 1,
            pages.stride(0),
            pages.shape[1],
            num_pages,
            dummy_page,
            width,
            offset,
            ahead or 0,
            tail,
            AHEAD=ahead is not None,
            PAGE=page_size,
            BLOCK=block(width),
            COLUMNS=_DEAD,
            num_warps=warps(block(width)),
        )
    return flat[0], flat[1], own[0], cu_q, own[1], table


def pick_places(
    tree: DraftTree, selection: Selection, rows: Tensor, lens: Tensor, prompt_lens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.reference.verify.pick_places`."""
    num_tokens = selection.node.shape[0]
    out = torch.empty(3, num_tokens, dtype=torch.int64, device=selection.node.device)
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        pick_places_kernel[-(-num_tokens // _BLOCK),](
            tree.depths,
            selection.node,
            rows.contiguous(),
            lens.contiguous(),
            prompt_lens,
            *out.unbind(),
            num_tokens,
            prompt_lens.shape[0] - 1,
            tree.depths.stride(0),
            tree.depths.stride(1),
            prompt_lens.stride(0),
            WIDTH=tree.token_ids.shape[1],
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out[0], out[1], out[2]
