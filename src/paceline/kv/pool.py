"""KVPool: the tensors that hold keys and values. Not here: who owns which page (`kv/pages.py`).

Letters: L layers, Hkv key/value heads, S slots, D head size, T tokens.

Head-major, so that a run of consecutive pages is a view [Hkv, run, D] and never a copy. A drafter
with a cache has a pool of its own with the *same slot numbers*: one page table, one allocator and
one prefix cache serve both. See docs/memory.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline import ops
from paceline.ops import calls
from paceline.ops.reference import kv as reference

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.kv.layout import KVLayout


class KVPool:
    """Keys and values of all layers, by slot.

    Slot s lies in page s // page_size. There are `num_pages` pages that the allocator hands out
    and one more, the dummy: padding rows point at it, and what is written to slot -1 lands there.
    A slot holds stale numbers, or NaN, until it is written: whoever reads must mask by selecting,
    never by multiplying with zero.

    Attributes:
        k: [L, Hkv, S, D] keys, S = (num_pages + 1) * page_size.
        v: [L, Hkv, S, D] values.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_layers: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        assert num_layers > 0, "a pool has at least one layer"
        assert num_pages > 0, "a pool has at least one page"
        assert page_size > 0, "a page has at least one slot"
        self.layout = layout
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        shape = (num_layers, layout.num_heads, self.num_slots, layout.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=self.device)
        self.v = torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def num_slots(self) -> int:
        """S: all slots, the dummy page's included."""
        return (self.num_pages + 1) * self.page_size

    @property
    def dummy_page(self) -> int:
        """Id of the page that nobody owns and nobody sees: the last."""
        return self.num_pages

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.k.nbytes + self.v.nbytes

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the entries of T tokens in one layer.

        Args:
            layer: index within this pool.
            slots: [T] int64, distinct; -1 writes nothing.
            k: [T, Hkv, D], rope applied.
            v: [T, Hkv, D].
        """
        ops.kv_write(self.k[layer], self.v[layer], slots, k, v)

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy entries from slots `src` to slots `dst` in all layers; all reads precede all writes.

        This is how an accepted tree path becomes contiguous. [0, 2, 3] -> [0, 1, 2] is safe.

        Args:
            src: [n] int64; -1 moves nothing.
            dst: [n] int64, distinct but for -1; -1 moves nothing.
        """
        if calls.ANNOUNCES:
            calls.announce("move", "torch", self.k, src, dst)
        reference.move((self.k, self.v), src, dst)

    def move_paths(self, path: Tensor, rows: Tensor, lens: Tensor, pages: Tensor) -> None:
        """Make the accepted path of every row contiguous, in all layers.

        Args:
            path: [B, A] int64 accepted nodes as selected indices within the row, rising, -1 padded. Node i
                lies at place lens + i; the path's j-th comes to lie at place lens + j.
            rows: [B] int64.
            lens: [B] int64 tokens cached before this step.
            pages: [R+1, G] int32 page ids of every row.
        """
        ops.move_paths(
            (self.k, self.v),
            path,
            rows,
            lens,
            pages,
            page_size=self.page_size,
            dummy_page=self.dummy_page,
        )
