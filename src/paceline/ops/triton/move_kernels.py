"""Device code of `ops/triton/move.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place_slot(pages, place, here, num_columns, dummy, PAGE: tl.constexpr):
    """Slot of a place of the row; -1 where it has no page."""
    page = tl.load(pages + place // PAGE, mask=here & (place // PAGE < num_columns), other=dummy)
    return tl.where(page == dummy, -1, page.to(tl.int64) * PAGE + place % PAGE)


@triton.jit
def _ways(path, pages, length, at, count, num_columns, dummy, PAGE: tl.constexpr):
    """Source and destination slot of a path's entry `at`, and whether it moves at all."""
    here = at < count
    place = tl.load(path + at, mask=here, other=0)
    src = _place_slot(pages, length + place, here, num_columns, dummy, PAGE)
    dst = _place_slot(pages, length + at, here, num_columns, dummy, PAGE)
    return src, dst, here & (place != at) & (src >= 0) & (dst >= 0)


@triton.jit(do_not_specialize=["spare", "width", "page_stride", "num_columns", "dummy"])
def move_kernel(
    k, v, path, rows, lens, pages,
    spare, width, page_stride, num_columns, dummy,
    layer_stride, head_stride, slot_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Move one row's path in some columns (head, number) of a layer's keys and values.

    From left to right, four entries at a time, all read before any is written. An entry never lies
    before where it goes, so no later one is overwritten unread.
    """
    b = tl.program_id(0)
    layer = tl.program_id(1)
    at = tl.arange(0, BLOCK_A)
    own_path = path + b.to(tl.int64) * width
    nodes = tl.load(own_path + at, mask=at < width, other=-1)
    moved = (nodes >= 0) & (nodes != at)
    if tl.max(moved.to(tl.int32), 0) == 0:
        return
    count = tl.sum((nodes >= 0).to(tl.int32), 0)
    first = tl.min(tl.where(moved, at, BLOCK_A), 0)
    row = tl.load(rows + b).to(tl.int64)
    row = tl.where(row < 0, spare, row)
    length = tl.load(lens + b)
    own_pages = pages + row * page_stride
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mine = column < HEADS * DIM
    offset = layer.to(tl.int64) * layer_stride + (column // DIM).to(tl.int64) * head_stride
    offset += column % DIM
    for i in range(first, count, 4):
        src_0, dst_0, does_0 = _ways(
            own_path, own_pages, length, i, count, num_columns, dummy, PAGE
        )
        src_1, dst_1, does_1 = _ways(
            own_path, own_pages, length, i + 1, count, num_columns, dummy, PAGE
        )
        src_2, dst_2, does_2 = _ways(
            own_path, own_pages, length, i + 2, count, num_columns, dummy, PAGE
        )
        src_3, dst_3, does_3 = _ways(
            own_path, own_pages, length, i + 3, count, num_columns, dummy, PAGE
        )
        k_0 = tl.load(k + offset + src_0 * slot_stride, mask=mine & does_0, other=0.0)
        v_0 = tl.load(v + offset + src_0 * slot_stride, mask=mine & does_0, other=0.0)
        k_1 = tl.load(k + offset + src_1 * slot_stride, mask=mine & does_1, other=0.0)
        v_1 = tl.load(v + offset + src_1 * slot_stride, mask=mine & does_1, other=0.0)
        k_2 = tl.load(k + offset + src_2 * slot_stride, mask=mine & does_2, other=0.0)
        v_2 = tl.load(v + offset + src_2 * slot_stride, mask=mine & does_2, other=0.0)
        k_3 = tl.load(k + offset + src_3 * slot_stride, mask=mine & does_3, other=0.0)
        v_3 = tl.load(v + offset + src_3 * slot_stride, mask=mine & does_3, other=0.0)
        tl.debug_barrier()
        tl.store(k + offset + dst_0 * slot_stride, k_0, mask=mine & does_0)
        tl.store(v + offset + dst_0 * slot_stride, v_0, mask=mine & does_0)
        tl.store(k + offset + dst_1 * slot_stride, k_1, mask=mine & does_1)
        tl.store(v + offset + dst_1 * slot_stride, v_1, mask=mine & does_1)
        tl.store(k + offset + dst_2 * slot_stride, k_2, mask=mine & does_2)
        tl.store(v + offset + dst_2 * slot_stride, v_2, mask=mine & does_2)
        tl.store(k + offset + dst_3 * slot_stride, k_3, mask=mine & does_3)
        tl.store(v + offset + dst_3 * slot_stride, v_3, mask=mine & does_3)
