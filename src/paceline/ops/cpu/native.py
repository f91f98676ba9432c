"""The loaded C kernels as functions, with their C types, and the reason where there are none."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.ops.cpu.build import built

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

logger = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the enum in vec.h

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
Call = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Native:
    """The library's functions. Arguments are as in the C sources; tensors are passed as addresses."""

    dense: Call
    dense_rows: Call
    packed: Call
    packed_rows: Call
    rms_norm: Call
    rope: Call
    silu_mul: Call
    kv_write: Call
    peaks: Call
    attention: Call
    stack: Call
    fast: bool  # compiled for a machine on which it is faster than torch
    columns: int  # output features in a block of a dense matrix
    pairs: bool  # bfloat16 matrices are laid out in pairs of input features (AVX512-BF16)
    tiles: bool  # such pairs are multiplied in tiles (AMX), which the system has granted
    groups: str | None  # instructions that `packed` is made of; None: it does nothing here
    path: Path


_SIGNATURES: dict[str, list[type]] = {
    "dense": [_P] * 4 + [_L] * 4 + [_I] * 6,
    "dense_rows": [_P] * 3 + [_L] * 3 + [_I] * 2,
    "packed": [_P] * 6 + [_L] * 4 + [_I] * 7,
    "packed_rows": [_P] * 5 + [_L] * 3 + [_I] * 4,
    "rms_norm": [_P] * 5 + [_L] * 5 + [_F] + [_I] * 3,
    "rope": [_P] * 6 + [_L] * 8 + [_I] * 2,
    "silu_mul": [_P] * 2 + [_L] * 3 + [_I] * 2,
    "kv_write": [_P] * 5 + [_L] * 8,
    "peaks": [_P] * 3 + [_L] * 2 + [_I],
    "attention": [_P] * 5 + [_F, _L, _I, _I],
    "stack": [_P] * 3 + [_I],
}
_INSTRUCTIONS = (None, "AVX512-VNNI", "AVX-VNNI", "AVX2", "AVX512BW", "NEON dot products")
# Products and attention let other Python threads run. What takes a few microseconds keeps the
# interpreter's lock: giving it away costs more than it brings.
_LONG = ("dense", "packed", "attention", "stack")


def load(path: Path) -> Native:
    """Load a library that `build` made.

    Raises:
        OSError: it is damaged, or not for this system.
    """
    short, long = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
    calls: dict[str, Call] = {}
    for name, types in _SIGNATURES.items():
        call = getattr(long if name in _LONG else short, name)
        call.argtypes = types
        call.restype = None
        calls[name] = call
    return Native(
        fast=bool(short.vectors_possible()),
        columns=short.dense_columns(),
        pairs=bool(short.dense_pairs()),
        tiles=bool(short.dense_tiles()),
        groups=_INSTRUCTIONS[short.packed_instructions()],
        path=path,
        **calls,
    )


@functools.cache
def loaded() -> Native | str:
    """Return this machine's kernels, compiling them if need be; or why there are none, a clause."""
    found = built()
    if found.path is None:
        return found.reason or "they can't be compiled"
    try:
        lib = load(found.path)
    except OSError as error:
        reason = f"{found.path} can't be loaded: {error}"
        logger.warning("own CPU kernels are not used: %s", reason)
        return reason
    if not lib.fast:
        return f"{found.compiler} makes neither AVX2 nor NEON code here, and torch is faster then"
    return lib


def native() -> Native | None:
    """Return this machine's kernels; None: see `refusal`."""
    found = loaded()
    return found if isinstance(found, Native) else None


def refusal(dtype: torch.dtype) -> str | None:
    """Why own kernels do not serve this dtype here, as a clause; None: they do."""
    if dtype not in DTYPES:
        return f"own kernels serve float32, bfloat16 and float16, not {str(dtype)[6:]}"
    found = loaded()
    return found if isinstance(found, str) else None


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd wants to know about this call; own kernels tell it nothing."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
