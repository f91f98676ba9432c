"""Attention whose bits depend on a query's own keys alone, for every kind of pass, as Triton kernels.

A query's keys are one list: its prefix, then the tail keys that it sees, in order. In a tree a key's index
is its depth, the same as when its ancestors have become prefix, so decode, chain, tree and prompt have the
same list. The list is cut into *tiles* of 64 indices and *units* of 4 tiles, both at absolute offsets:

    index     0 ......... 63 | 64 ...... 95 96 .. 103 | 104 ...      prefix 96, a path of 8 nodes
    tile            0        |           1            |
    read by   all of a block |  each query, its own   |

`attend_kernel` takes (row, block of queries, key/value head, part of the list). As many queries as fill 16
packed rows share a program, and with it the tiles that are the same for all of them: those of the prefix,
and in a causal pass all. Where lists part ways each query's tile is gathered by its path and multiplied with
all packed rows, of which the others' stay as they are. A place without a key adds exact zeros.

A unit has a softmax of its own; units are joined from left to right, by the program that goes through all of
them or, where few programs have much to read, by `join_kernel`: the same joins in the same order. So the
number of rows, queries and pages decides who works, and touches no bit: 16 packed rows, 64 keys, 256 keys a
unit are the same in every pass, and so is the code that multiplies them.

`paths_kernel` writes down each query's tail keys, once a pass.

Nothing is read back and grids follow from host values, so a pass can be captured in a CUDA graph.

The running softmax is FlashAttention's (arXiv 2205.14135); the idea of splitting a decode's keys is
Flash-Decoding's (Dao et al., 2023), here at places that depend on nothing.

Letters: B rows, T tokens, Hq/Hkv query and key/value heads, g = Hq / Hkv, D head size, S slots, G pages a
row, W words of mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2
from typing import TYPE_CHECKING, Final

import torch

from paceline.ops.triton.attention_invariant_kernels import (
    attend_kernel,
    join_kernel,
    paths_kernel,
)
from paceline.ops.triton.sizes import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.ops.triton.grid import WorkSpace

TILE: Final = 64  # keys
UNIT_TILES: Final = 4
_LEAST_M: Final = 16  # packed rows of a program, but for larger groups
_PROGRAMS: Final = 512  # if there are as many without, keys are not split among programs
_WORK_BYTES: Final = 256 << 20  # most bytes of partial results
_WHOLE: Final = 1 << 24  # tiles of a program that goes through all; times 64 it fits 32 bits
_WORD: Final = 64
_STAGES: Final = 5  # two tiles are on their way at once, each after the look-up of its slots
_PARTS: Final = 4  # units that a joining program loads before it waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The tail keys that each query of a pass sees."""

    nodes: Tensor  # [T, 64 W] int32 tail indices in order, then -1
    slots: Tensor  # [T, 64 W] int32 theirs, then -1
    counts: Tensor  # [T] int32; what belongs to dead tokens is not set


def paths_of(
    mask: Tensor,
    *,
    cu_q: Tensor,
    prefix_lens: Tensor,
    pages: Tensor,
    page_size: int,
    num_rows: int,
    q_len: int,
) -> Paths:
    """List the set bits of every query's mask.

    Args:
        mask: [T, W] int64.
        cu_q: [B + 1] int64.
        prefix_lens: [B] int64.
        pages: [B, G] int32.
        page_size: tokens per page.
        num_rows: B.
        q_len: most queries of a row.
    """
    mask, pages = mask.contiguous(), pages.contiguous()
    tokens, width = mask.shape[0], mask.shape[1] * _WORD
    nodes, slots = torch.empty((2, tokens, width), dtype=torch.int32, device=mask.device)
    counts = torch.empty(tokens, dtype=torch.int32, device=mask.device)
    with torch.cuda.device_of(mask):  # type: ignore[no-untyped-call]
        paths_kernel[(num_rows, q_len)](
            mask,
            cu_q,
            prefix_lens,
            pages,
            nodes,
            slots,
            counts,
            pages.shape[1],
            pages.stride(0),
            mask.stride(0),
            width,
            PAGE=page_size,
            NODES=power_of_two(width),
            num_warps=1,
            num_stages=1,
        )
    return Paths(nodes=nodes, slots=slots, counts=counts)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    paths: Paths | None,
    work: WorkSpace,
    num_rows: int,
    q_len: int,
    pages: Tensor,
    prefix_lens: Tensor,
    tail_lens: Tensor,
    cu_q: Tensor,
    positions: Tensor,
    page_size: int,
    scale: float,
    window: int | None,
    causal: bool,
    split: bool | None = None,
) -> Tensor:
    """Attend over the pages of every row; what a query sees is said by `ForwardBatch`.

    Args:
        q: [T, Hq, D] in the cache's dtype.
        k_cache: [Hkv, S, D] of one layer.
        v_cache: [Hkv, S, D].
        paths: of the pass's mask; None: causal.
        work: memory for partial results.
        num_rows: B.
        q_len: most queries of a row.
        pages: [B, G] int32.
        prefix_lens: [B] int64.
        tail_lens: [B] int64.
        cu_q: [B + 1] int64.
        positions: [T] int64.
        page_size: tokens per page.
        scale: of the scores, positive.
        window: positions, or None.
        causal: hide tail keys with a later position.
        split: a program takes one unit; None: where there are few programs. Changes no bit.

    Returns:
        [T, Hq, D]; zeros for dead tokens and for a query that sees nothing.
    """
    num_tokens, q_heads, dim = q.shape
    kv_heads = k_cache.shape[0]
    group = q_heads // kv_heads
    assert k_cache.stride() == v_cache.stride(), "keys and values lie alike"
    assert k_cache.stride(2) == 1, "a key is contiguous"
    q, pages = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, pages))
    block_m = max(_LEAST_M, power_of_two(group))
    queries = block_m // group
    blocks, block_d, block_g = -(-q_len // queries), power_of_two(dim), power_of_two(group)
    units = -(-pages.shape[1] * page_size // (TILE * UNIT_TILES))
    partials = units * num_tokens * q_heads
    if split is None:
        small = partials * (dim + 2) * 4 <= _WORK_BYTES
        split = small and num_rows * blocks * kv_heads < _PROGRAMS
    split = split and units > 1
    # Kernels take pointers: one that is not used may be anything of its type.
    peaks = totals = partial = work.take(partials * (dim + 2) if split else 1, q.device)
    if split:
        peaks, totals = partial[partials * dim :], partial[partials * (dim + 1) :]
    part_tiles = UNIT_TILES if split else _WHOLE
    out = torch.empty((num_tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    nodes = slots = counts = pages
    if paths is not None:
        nodes, slots, counts = paths.nodes, paths.slots, paths.counts
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        attend_kernel[(num_rows * blocks, kv_heads, units if split else 1)](
            q,
            k_cache,
            v_cache,
            out,
            partial,
            peaks,
            totals,
            pages,
            prefix_lens,
            tail_lens,
            cu_q,
            positions,
            nodes,
            slots,
            counts,
            num_rows,
            num_tokens,
            part_tiles,
            int(split),
            pages.shape[1],
            blocks,
            scale * log2(e),
            window or 0,
            int(paths is not None),
            nodes.shape[1],
            q.stride(0),
            q.stride(1),
            k_cache.stride(0),
            k_cache.stride(1),
            pages.stride(0),
            GROUP=group,
            DIM=dim,
            BLOCK_D=block_d,
            PAGE=page_size,
            BLOCK_M=block_m,
            QUERIES=queries,
            TILE=TILE,
            UNIT_TILES=UNIT_TILES,
            STAGES=_STAGES,
            CAUSAL=causal,
            HAS_WINDOW=window is not None,
            num_warps=4,
            num_stages=_STAGES,
        )
        if split:
            join_kernel[(num_rows, q_len, kv_heads)](
                partial,
                peaks,
                totals,
                out,
                prefix_lens,
                tail_lens,
                cu_q,
                num_tokens,
                part_tiles,
                GROUP=group,
                DIM=dim,
                BLOCK_D=block_d,
                BLOCK_G=block_g,
                TILE=TILE,
                PARTS=_PARTS,
                num_warps=min(max(block_g * block_d // 512, 1), 16),
                num_stages=1,
            )
    return out
