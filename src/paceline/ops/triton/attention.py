"""Attention of a BLOCK pass over the paged pool, as two Triton kernels.

`attend_kernel` takes (row, key/value head, block of queries, unit of keys). All query heads of the
key/value head and all queries of the row are packed into one matrix, so a key is read once for all of
them, however many nodes the row verifies. A row's places are cut into *units* at fixed offsets and a
unit into tiles at fixed offsets. Tiles that lie wholly in the prefix are visible to everybody and go
without a mask; the rest, one to a few, look at the ancestor bits:

    place     0 ........... 63 | 64 ...... 95 96 .. 103 |        prefix 96, tail of 8 nodes
    tile           no mask     |     bit -32 ... 7      |        bit < 0: prefix, seen by all

Both kinds go through one pipelined loop, if every key of the tail is seen by somebody, which is so where
the tail is the queries: queries see themselves. Otherwise what nobody sees has to be zeroed after it was
loaded (it may be NaN), and such tiles go through a loop of their own.

Each unit has a softmax of its own. Where a row has several, each program leaves its unit's in work
space and counts itself in; whoever is last joins them from left to right, whatever the order of
arrival, and sets the counter back to zero. If that is much for one program, `join_kernel` does it with
many; the arithmetic is the same. A last unit of few keys is read with the one before (`Tiles.least`).

Nothing is read back and grids follow from host values, so a pass can be captured in a CUDA graph.
Programs beyond a row's queries or keys stop at once. A list of the (row, unit) pairs that exist,
walked by a fixed number of programs, would replace the grid only: see `ops/triton/grid.py`.

The idea of splitting a decode's keys is Flash-Decoding's (Dao et al., 2023), the running softmax
FlashAttention's (arXiv 2205.14135).

Letters: B rows, T tokens, Hq/Hkv query and key/value heads, g = Hq / Hkv, D head size, S slots, G
pages a row, W words of 32 bits, M packed queries of a row (query i, head h at i * g + h), N keys.
"""

from __future__ import annotations

from math import e, log2
from typing import TYPE_CHECKING

import torch

from paceline.ops.triton import overlap
from paceline.ops.triton.attention_kernels import attend_kernel, join_kernel
from paceline.ops.triton.sizes import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.ops.triton.grid import Shape, WorkSpace

# What a program of the joining kernel holds; most units that are loaded at once (with 16 compilation
# takes ten times as long).
_JOIN_M, _JOIN_COLUMNS, _JOIN_UNITS = 4, 32, 8
# Units x packed queries that a warp of a last program loads at once: 128 registers of a thread.
_LAST_LOADS = 32


def joined_at_once(planned: Shape) -> tuple[int, int]:
    """Packed queries and units that a last program loads before it waits: powers of two.

    All queries of its block if they can be, since rows in service fill about half of their page table
    and so have half of the units that are planned.
    """
    tiles = planned.tiles
    loads, most = _LAST_LOADS * tiles.num_warps, power_of_two(planned.units)
    few = max(2, power_of_two(planned.units // 2 + 1) // 2)
    queries = min(tiles.block_m, power_of_two(planned.packed), max(1, loads // few))
    return queries, min(most, _JOIN_UNITS, max(2, loads // queries))


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    planned: Shape,
    work: WorkSpace,
    pages: Tensor,
    prefix_lens: Tensor,
    tail_lens: Tensor,
    cu_q: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    page_size: int,
    scale: float,
    window: int | None,
    causal: bool,
) -> Tensor:
    """Attend over the pages of every row; what a query sees is said by `ForwardBatch`.

    A number that is not finite in a key which one query of a row sees spoils the row's other queries
    too; one that none sees spoils nothing.

    Args:
        q: [T, Hq, D] in the cache's dtype.
        k_cache: [Hkv, S, D] of one layer.
        v_cache: [Hkv, S, D].
        planned: from `shape`.
        work: memory for partial results.
        pages: [B, G] int32.
        prefix_lens: [B] int64.
        tail_lens: [B] int64.
        cu_q: [B + 1] int64.
        positions: [T] int64.
        mask: [T, words] int64 bits over the tail, or None: causal.
        page_size: tokens per page.
        scale: of the scores, positive.
        window: positions, or None.
        causal: hide tail keys with a later position.

    Returns:
        [T, Hq, D]; zeros for dead tokens and for a query that sees nothing.
    """
    num_tokens, q_heads, dim = q.shape
    kv_heads = k_cache.shape[0]
    assert k_cache.stride() == v_cache.stride(), "keys and values lie alike"
    assert k_cache.stride()[1:] == (dim, 1), "a head's keys are contiguous"
    q, pages = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, pages))
    out = torch.empty((num_tokens, q_heads, dim), dtype=q.dtype, device=q.device)
    group, tiles, rows = q_heads // kv_heads, planned.tiles, planned.num_rows
    # Kernels take pointers: one that is not used may be anything.
    partial = stats = arrivals = out
    if planned.units > 1:
        space = work.take(planned.num_partials * (dim + 2), q.device)
        partial, stats = space, space[planned.num_partials * dim :]
    join_m, join_units = 1, 1
    if planned.last_joins:
        arrivals = work.arrivals(q.device)
        join_m, join_units = joined_at_once(planned)
    bits, one_word = positions, False
    if mask is not None:
        bits = mask.contiguous()
        one_word = bits.shape[1] == 1
        bits = bits if one_word else bits.view(torch.int32)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        grid = (rows * planned.blocks, kv_heads, planned.units)
        attend_kernel[grid](
            q,
            k_cache,
            v_cache,
            out,
            partial,
            stats,
            arrivals,
            pages,
            prefix_lens,
            tail_lens,
            cu_q,
            positions,
            bits,
            rows,
            num_tokens,
            planned.units,
            tiles.unit,
            tiles.least,
            planned.packed,
            pages.shape[1],
            scale * log2(e),
            window or 0,
            bits.shape[-1],
            q.stride(0),
            q.stride(1),
            k_cache.stride(0),
            out.stride(0),
            pages.stride(0),
            bits.stride(0),
            GROUP=group,
            DIM=dim,
            BLOCK_D=power_of_two(dim),
            PAGE=page_size,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            STAGES=tiles.num_stages,
            BITS=not (causal or window is not None or (mask is not None and not one_word)),
            LAST_JOINS=planned.last_joins,
            JOIN_M=join_m,
            JOIN_UNITS=join_units,
            HAS_MASK=mask is not None,
            ONE_WORD=one_word,
            CAUSAL=causal,
            HAS_WINDOW=window is not None,
            **overlap.between(out),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
        if planned.units > 1 and not planned.last_joins:
            grid = (rows * -(-planned.packed // _JOIN_M), kv_heads, dim // _JOIN_COLUMNS)
            join_kernel[grid](
                partial,
                stats,
                out,
                prefix_lens,
                tail_lens,
                cu_q,
                rows,
                planned.units,
                tiles.unit,
                tiles.least,
                planned.packed,
                out.stride(0),
                GROUP=group,
                DIM=dim,
                UNITS=min(_JOIN_UNITS, power_of_two(planned.units)),
                BLOCK_M=_JOIN_M,
                COLUMNS=_JOIN_COLUMNS,
                **overlap.between(out),
                num_warps=1,
                num_stages=1,
            )
    return out
