"""Grid, tiles and work space of the attention kernels: host values only, nothing that needs Triton.

What is missing on purpose: a grid covers the longest row that the page table can hold, so in a batch
of one long and many short rows most programs stop at once. The way out is a work list: a kernel in
`plan` that writes the (row, unit) pairs that exist, and a fixed number of programs that walk it.
`Shape` is where that number would be, and as units are at fixed offsets no result would change.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

HEAD_DIMS = (64, 96, 128)
DTYPES = (torch.bfloat16, torch.float16)
_WORK_BYTES = 256 << 20  # most bytes of work space for partial results
_LONG_ROW = 8  # units; longer rows are split even if there are enough programs without


def refusal(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernels cannot serve such keys here, as a clause; None if they can."""
    if dtype not in DTYPES:
        return f"it is for bfloat16 and float16, not for {dtype}"
    if head_dim not in HEAD_DIMS:
        sizes = ", ".join(str(n) for n in HEAD_DIMS)
        return f"it is for heads of {sizes} numbers, not of {head_dim}"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"it needs Triton, which can't be imported ({error}); pip install triton"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How a program works; a choice of speed. Only `unit` and `block_n` touch the result's bits."""

    block_m: int  # packed queries, a power of two >= 16
    block_n: int  # keys at once, a power of two >= 32
    unit: int  # keys with a softmax of their own, a multiple of block_n
    num_warps: int
    num_stages: int


def tiles_for(packed: int, dim: int) -> Tiles:
    """Return the tiles for rows of at most `packed` packed queries and a head size."""
    if packed <= 16:
        return Tiles(block_m=16, block_n=64, unit=512, num_warps=4, num_stages=3)
    if packed <= 32:
        return Tiles(block_m=32, block_n=64, unit=512, num_warps=4, num_stages=3)
    if packed <= 64:
        return Tiles(block_m=64, block_n=64, unit=512, num_warps=4, num_stages=3)
    warps = 8 if dim > 64 else 4
    return Tiles(block_m=128, block_n=64, unit=1024, num_warps=warps, num_stages=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Host values of a pass, from which grids and work space follow; the same for all layers."""

    num_rows: int
    kv_heads: int
    packed: int  # M: most queries of a row x g
    blocks: int  # of packed queries
    units: int  # most units of a row
    split: bool  # one program a unit, joined afterwards; else one walks all units of its row
    tiles: Tiles

    @property
    def num_partials(self) -> int:
        """Packed queries x units of all rows and heads."""
        return self.num_rows * self.kv_heads * self.units * self.packed


def shape(
    *,
    num_rows: int,
    q_len: int,
    num_keys: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    processors: int,
    tiles: Tiles | None = None,
) -> Shape:
    """Choose grid and tiles of a pass.

    Args:
        num_rows: rows with queries.
        q_len: most queries of a row.
        num_keys: most keys that a row's pages hold.
        q_heads: Hq.
        kv_heads: Hkv.
        dim: D.
        processors: multiprocessors of the device.
        tiles: instead of `tiles_for`'s.
    """
    packed = q_len * (q_heads // kv_heads)
    tiles = tiles or tiles_for(packed, dim)
    whole = Shape(
        num_rows=num_rows,
        kv_heads=kv_heads,
        packed=packed,
        blocks=-(-packed // tiles.block_m),
        units=-(-num_keys // tiles.unit),
        split=False,
        tiles=tiles,
    )
    few = num_rows * kv_heads * whole.blocks < 2 * processors
    fits = whole.num_partials * (dim + 2) * 4 <= _WORK_BYTES
    return replace(whole, split=whole.units > 1 and fits and (few or whole.units > _LONG_ROW))


class WorkSpace:
    """Memory for partial results, reused by all layers and passes.

    It grows, but what was handed out stays alive: captured graphs go on writing to it.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def take(self, count: int, device: torch.device) -> Tensor:
        """Return at least `count` float32 numbers on a device."""
        for kept in self._kept:
            if kept.device == device and kept.numel() >= count:
                return kept
        made = torch.empty(1 << (count - 1).bit_length(), dtype=torch.float32, device=device)
        self._kept.append(made)
        return made
