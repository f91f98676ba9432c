"""Attention over pages by the own kernel: a plan of a pass, and the call for each layer.

Letters: B rows, T tokens, Hq/Hkv heads, S slots, D head size, G pages per row, W mask words.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.ops.cpu.native import DTYPES, native
from paceline.ops.cpu.threads import kernel_threads

if TYPE_CHECKING:
    from torch import Tensor


class _Plan(ctypes.Structure):
    """`Plan` in attention.c."""

    _fields_ = (
        ("prefix_lens", ctypes.c_void_p),
        ("cu_q", ctypes.c_void_p),
        ("tail_lens", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("words", ctypes.c_int64),
        ("pages_stride", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("q_heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("pool_head", ctypes.c_int64),
        ("q_dtype", ctypes.c_int),
        ("pool_dtype", ctypes.c_int),
    )


def refuses(dtype: torch.dtype, width: int) -> str | None:
    """Why the kernel can't serve a pool of this dtype and head size; None: it can."""
    if dtype not in DTYPES:
        return f"it serves float32, bfloat16 and float16, not {str(dtype)[6:]}"
    if width % 16:
        return f"it serves head sizes that are multiples of 16, not {width}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """A pass, in the form that the kernel reads; the same for all layers of one pool."""

    struct: _Plan
    address: int
    tensors: tuple[Tensor | None, ...]  # keeps what the addresses point to
    q_dtype: torch.dtype


def plan(
    *,
    num_rows: int,
    positions: Tensor,
    prefix_lens: Tensor,
    cu_q: Tensor,
    tail_lens: Tensor,
    mask: Tensor | None,
    pages: Tensor,
    page_size: int,
    q_heads: int,
    q_dtype: torch.dtype,
    k_cache: Tensor,
) -> Planned:
    """Note the addresses of a pass.

    Args:
        num_rows: real rows: the first ones.
        positions: [T] int64.
        prefix_lens: [B] int64.
        cu_q: [B+1] int64.
        tail_lens: [B] int64.
        mask: [T, W] int64 or None.
        pages: [B, G] int32.
        page_size: tokens per page.
        q_heads: Hq.
        q_dtype: of queries and output.
        k_cache: [Hkv, S, D] of any layer; the value cache is shaped alike.
    """
    tensors = [t.contiguous() for t in (prefix_lens, cu_q, tail_lens, positions)]
    mask = None if mask is None else mask.contiguous()
    pages = pages if pages.stride(1) == 1 else pages.contiguous()
    assert pages.dtype == torch.int32, "page ids are int32"
    assert all(t.dtype == torch.int64 for t in tensors), "index tensors are int64"
    kv_heads, _, width = k_cache.shape
    struct = _Plan(
        prefix_lens=tensors[0].data_ptr(),
        cu_q=tensors[1].data_ptr(),
        tail_lens=tensors[2].data_ptr(),
        mask=None if mask is None else mask.data_ptr(),
        positions=tensors[3].data_ptr(),
        pages=pages.data_ptr(),
        rows=num_rows,
        tokens=positions.shape[0],
        words=0 if mask is None else mask.shape[1],
        pages_stride=pages.stride(0),
        page_size=page_size,
        q_heads=q_heads,
        kv_heads=kv_heads,
        width=width,
        pool_head=k_cache.stride(0),
        q_dtype=DTYPES[q_dtype],
        pool_dtype=DTYPES[k_cache.dtype],
    )
    return Planned(
        struct=struct,
        address=ctypes.addressof(struct),
        tensors=(*tensors, mask, pages),
        q_dtype=q_dtype,
    )


def attend(
    planned: Planned,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    scale: float,
    window: int | None,
    causal: bool,
) -> Tensor:
    """Attend in one layer.

    Args:
        planned: the pass.
        q: [T, Hq, D] in the plan's dtype.
        k_cache: [Hkv, S, D] of the layer.
        v_cache: [Hkv, S, D] of the layer.
        scale: of the scores.
        window: positions that a query sees back, itself included; None: all.
        causal: also hide later positions, whatever the mask says.

    Returns:
        [T, Hq, D] in q's dtype.
    """
    lib = native()
    assert lib is not None, "a backend chose own kernels where there are none"
    assert q.dtype == planned.q_dtype, "the plan was made for another dtype"
    q = q.contiguous()
    out = torch.empty_like(q)
    lib.attention(
        planned.address,
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        out.data_ptr(),
        scale,
        window or 0,
        causal,
        kernel_threads(),
    )
    return out
