"""Grid, tiles and work space of the attention kernels: host values only, nothing that needs Triton.

What is missing on purpose: a grid covers the longest row that the page table can hold, so in a batch
of one long and many short rows most programs stop at once. The way out is a work list: a kernel in
`plan` that writes the (row, unit) pairs that exist, and a fixed number of programs that walk it.
`Shape` is where that number would be, and as units are at fixed offsets no result would change.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

HEAD_DIMS = (64, 96, 128)
DTYPES = (torch.bfloat16, torch.float16)
_WORK_BYTES = 256 << 20  # most bytes of work space for partial results
_ARRIVALS = 1 << 16  # most (row, key/value head, block of queries) whose last program joins
# Most units, and most units x packed queries, that a last program joins by itself: one multiprocessor
# reads 512 bytes for each of the latter, a kernel more takes about 2 microseconds.
_UNITS_BY_LAST, _JOINED_BY_LAST = 32, 1024
_ANY: Final = sys.maxsize

# The choice of tiles: the first line whose bounds hold. To be revised with the benchmark's --sweep.
# Few streams need small units, so that there are enough programs; a whole row in one unit needs no
# joining, which takes microseconds where packed queries are many. Products of 64 rows have instructions
# of their own on recent GPUs, so that fewer are often padded to 64. What no sweep has measured lies
# between lines that one has. `keys` is the page table's bound, of which rows in service hold about half.
#
#    most packed  streams  keys      block_m  block_n  unit  least  warps  stages
_CHOICE: Final = (
    ((16, 16, 4096), (16, 64, 128, 1, 4, 3)),
    ((128, 16, 4096), (16, 64, 256, 128, 4, 3)),
    ((16, 16, 32_768), (16, 64, 256, 128, 4, 3)),
    ((_ANY, 16, 16_384), (64, 64, 256, 128, 4, 3)),
    ((_ANY, 16, 32_768), (64, 64, 512, 256, 4, 3)),
    ((16, 64, 4096), (16, 32, 256, 128, 2, 4)),
    ((16, 128, 4096), (16, 32, 512, 256, 2, 4)),
    ((16, 256, _ANY), (64, 64, 1024, 512, 4, 3)),
    ((16, _ANY, 4096), (16, 32, 4096, 1, 2, 4)),
    ((16, _ANY, _ANY), (16, 32, 2048, 1024, 2, 4)),
    ((32, 64, 4096), (64, 32, 256, 128, 4, 4)),
    ((32, 128, 4096), (64, 64, 4096, 1, 4, 3)),
    ((32, 256, _ANY), (64, 64, 1024, 512, 4, 3)),
    ((24, _ANY, 4096), (32, 64, 4096, 1, 4, 3)),
    ((64, 32, 4096), (64, 64, 256, 128, 8, 3)),
    ((64, 64, 2304), (64, 64, 4096, 1, 4, 3)),
    ((64, 64, 4096), (64, 64, 1024, 512, 8, 3)),
    ((64, 128, 2304), (64, 64, 4096, 1, 4, 3)),
    ((64, 256, 4096), (64, 32, 4096, 1, 4, 4)),
    ((64, 256, _ANY), (64, 32, 1024, 512, 4, 4)),
    ((64, _ANY, 4096), (64, 32, 4096, 1, 4, 4)),
    ((64, _ANY, _ANY), (64, 32, 2048, 1024, 4, 4)),
    ((_ANY, 128, 4096), (64, 64, 512, 256, 4, 3)),
    ((_ANY, 128, _ANY), (64, 64, 2048, 1024, 4, 3)),
    ((_ANY, 256, _ANY), (128, 64, 1024, 512, 8, 3)),
    ((_ANY, _ANY, 4096), (128, 64, 4096, 1, 8, 3)),
    ((_ANY, _ANY, _ANY), (128, 64, 2048, 1024, 8, 3)),
)


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
    least: int = 1  # fewest keys of a row's last unit, at most `unit`; fewer go to the unit before
    last_joins: bool | None = None  # a row's last program joins them, not a kernel; None: if few

    def units(self, num_keys: int) -> int:
        """Units of a row of so many keys."""
        return max(1, -(-(num_keys - self.least + 1) // self.unit))


def tiles_for(packed: int, streams: int, num_keys: int, dim: int) -> Tiles:
    """Choose the tiles of a pass.

    Args:
        packed: most packed queries of a row.
        streams: rows x key/value heads, each of which is read once.
        num_keys: most keys that a row's pages hold.
        dim: numbers of a head.
    """
    asked = (packed, streams, num_keys)
    block_m, block_n, unit, least, warps, stages = next(
        chosen
        for bounds, chosen in _CHOICE
        if all(n <= most for n, most in zip(asked, bounds, strict=True))
    )
    if dim <= 64:  # half the work; but products of 64 rows take four warps
        warps = max(warps // 2, 4 if block_m >= 64 else 1)
    return Tiles(
        block_m=block_m,
        block_n=block_n,
        unit=unit,
        least=least,
        num_warps=warps,
        num_stages=stages,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Host values of a pass, from which grids and work space follow; the same for all layers."""

    num_rows: int
    kv_heads: int
    packed: int  # M: most queries of a row x g
    blocks: int  # of packed queries
    units: int  # most units of a row; if there are several, their results are joined
    last_joins: bool  # the last program of a row's units to arrive, not a kernel
    tiles: Tiles

    @property
    def num_partials(self) -> int:
        """Packed queries x units of all rows and heads; 0 if no row has two units."""
        several = self.units if self.units > 1 else 0
        return self.num_rows * self.kv_heads * several * self.packed


def shape(
    *,
    num_rows: int,
    q_len: int,
    num_keys: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
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
        tiles: instead of `tiles_for`'s.
    """
    packed, streams = q_len * (q_heads // kv_heads), num_rows * kv_heads
    tiles = tiles or tiles_for(packed, streams, num_keys, dim)
    while streams * packed * tiles.units(num_keys) * (dim + 2) * 4 > _WORK_BYTES:
        if tiles.unit >= num_keys:
            break  # one unit has no partial results
        tiles = replace(tiles, unit=2 * tiles.unit)
    blocks, units = -(-packed // tiles.block_m), tiles.units(num_keys)
    loads = units * min(packed, tiles.block_m)
    few = units <= _UNITS_BY_LAST and loads <= _JOINED_BY_LAST
    last = few if tiles.last_joins is None else tiles.last_joins
    return Shape(
        num_rows=num_rows,
        kv_heads=kv_heads,
        packed=packed,
        blocks=blocks,
        units=units,
        last_joins=units > 1 and last and streams * blocks <= _ARRIVALS,
        tiles=tiles,
    )


class WorkSpace:
    """Memory for partial results, reused by all layers and passes.

    It grows, but what was handed out stays alive: captured graphs go on writing to it.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._arrivals: dict[torch.device, Tensor] = {}

    def take(self, count: int, device: torch.device) -> Tensor:
        """Return at least `count` float32 numbers on a device."""
        for kept in self._kept:
            if kept.device == device and kept.numel() >= count:
                return kept
        made = torch.empty(1 << (count - 1).bit_length(), dtype=torch.float32, device=device)
        self._kept.append(made)
        return made

    def arrivals(self, device: torch.device) -> Tensor:
        """Return [65536] int32: counters of a device, zero before and after every pass.

        Raises:
            RuntimeError: they would have to be made while a graph is captured, which runs nothing.
        """
        if device not in self._arrivals:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                msg = (
                    "counters of attention were asked for first while a CUDA graph is captured; they "
                    "are zeroed outside. Run the pass once before it is captured"
                )
                raise RuntimeError(msg)
            self._arrivals[device] = torch.zeros(_ARRIVALS, dtype=torch.int32, device=device)
        return self._arrivals[device]
