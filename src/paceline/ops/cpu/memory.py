"""Memory for weights in large pages: reading them is what a decode step spends its time on.

With 4 KB pages a step walks through tens of thousands of them; large ones made one row's products
of a 135 M model 7 % faster (benchmarks/results/cpu-ops.json). Where the system has none, this
is plain memory.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap

import torch
from torch import Tensor

_HUGE = 2 << 20
_CHUNK = 32 << 20
_ALIGN = 64


class Arena:
    """Hands out pieces of large mappings; a mapping lives as long as a tensor in it does.

    Only the mapping that is being filled is held here.
    """

    def __init__(self) -> None:
        self._chunk: Tensor | None = None
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new uninitialised contiguous tensor, aligned to 64 bytes."""
        size = math.prod(shape) * dtype.itemsize
        if size == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(shape, dtype=dtype)
        if size > _CHUNK // 2:
            return _mapping(size)[:size].view(dtype).view(shape)
        if self._chunk is None or self._used + size > self._chunk.shape[0]:
            self._chunk = _mapping(_CHUNK)
            self._used = 0
        piece = self._chunk[self._used : self._used + size]
        self._used += -(-size // _ALIGN) * _ALIGN
        return piece.view(dtype).view(shape)


def _mapping(size: int) -> Tensor:
    """At least `size` bytes that start at a large page's border."""
    size = -(-size // _HUGE) * _HUGE
    area = mmap.mmap(-1, size + _HUGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)  # keeps the mapping alive
    start = -whole.data_ptr() % _HUGE
    with contextlib.suppress(OSError):  # a kernel without large pages
        area.madvise(mmap.MADV_HUGEPAGE, start, size)
    return whole[start : start + size]


@functools.cache
def arena() -> Arena:
    """The process's arena. Like malloc it is shared, and means nothing to who uses it."""
    return Arena()


def place(value: Tensor) -> Tensor:
    """Copy a tensor, however laid out, into the arena as a contiguous one."""
    room = arena().empty(tuple(value.shape), value.dtype)
    return room.copy_(value)
