"""GGUF's tensor formats: their sizes, which can be read, and blocks -> codes or plain tensors.

Q4_0, Q4_1 and Q8_0 stay codes with their scales, so nothing is lost and a CPU can multiply with them.
F32, F16 and BF16 stay what they are. Other formats are dequantised by the package `gguf`, whose plain
numpy takes seconds.

Letters: N rows, K columns, G = K / 32 groups of a row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.models.gguf import Entry
from paceline.ops.packed import Groups

GROUP = 32
DENSE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
Q4_0, Q4_1, Q8_0 = 2, 3, 8
BLOCK_BYTES = {Q4_0: 18, Q4_1: 20, Q8_0: 34}  # of 32 values
Bytes = NDArray[np.uint8]


def decode(kind: int, parts: Mapping[str, Tensor]) -> Tensor | Groups:
    """Parts as they are kept -> a plain tensor or groups.

    Scales and mins of 4-bit formats are widened to float32: -8 * scale may leave float16's range.
    """
    if kind not in BLOCK_BYTES:
        return parts[""]
    codes, scales = parts["#codes"], parts["#scales"]
    if kind == Q8_0:
        return Groups(codes=codes, scales=scales, mins=None, size=GROUP, bits=8)
    # A block's low nibbles are its first half, its high nibbles the second.
    halves = codes.view(*codes.shape[:-1], -1, GROUP // 2)
    codes = torch.cat((halves & 15, halves >> 4), dim=-1).flatten(-2)
    scales = scales.float()
    mins = parts["#mins"].float() if kind == Q4_1 else scales * -8
    return Groups(codes=codes, scales=scales, mins=mins, size=GROUP, bits=4)


def dequantised_dtype(dtype: torch.dtype) -> torch.dtype:
    """What formats without codes are kept in: the network's dtype, float32 if that is wider."""
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


def split_blocks(kind: int, blocks: Bytes) -> dict[str, Tensor]:
    """Split blocks [N, G, bytes] into codes [N, K or K/2] and scales and mins [N, G] float16."""

    def halves(start: int) -> Tensor:
        column = np.ascontiguousarray(blocks[..., start : start + 2])
        return torch.from_numpy(column.view(np.float16)[..., 0])

    first = 4 if kind == Q4_1 else 2
    codes = torch.from_numpy(np.ascontiguousarray(blocks[..., first:])).flatten(-2)
    if kind == Q8_0:
        return {"#codes": codes.view(torch.int8), "#scales": halves(0)}
    found = {"#codes": codes, "#scales": halves(0)}
    return found | {"#mins": halves(2)} if kind == Q4_1 else found


def nbytes(entry: Entry) -> int:
    """Bytes of a tensor in the file."""
    import gguf

    kind = gguf.GGMLQuantizationType(entry.tensor.kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(entry.tensor.shape) // block * size


def refuse_unsupported(path: Path, entries: Mapping[str, Entry]) -> None:
    """Name every format that can't be read, and how many tensors have it."""
    counts = Counter(entry.tensor.kind for entry in entries.values())
    names = {kind: _unsupported(kind) for kind in counts}
    wrong = [f"{name} ({counts[kind]} tensors)" for kind, name in names.items() if name]
    if wrong:
        msg = (
            f"{path} is quantised as {', '.join(wrong)}, which can't be read. Supported are F32, "
            "F16, BF16, Q4_0, Q4_1, Q8_0 and what the package `gguf` dequantises (Q5_0 to Q6_K, "
            "IQ and others). Use another file of this model, or a newer `gguf`."
        )
        raise ModelError(msg)


def refuse_misshapen(path: Path, entries: Mapping[str, Entry]) -> None:
    """Name tensors whose shape does not go with their format's blocks or with the heads."""
    import gguf

    wrong = []
    for name, entry in entries.items():
        shape = entry.tensor.shape
        block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(entry.tensor.kind)]
        if not shape or min(shape) < 1 or shape[-1] % block:
            wrong.append(f"{name} of shape {list(shape)} in blocks of {block}")
        elif entry.heads is not None and shape[0] % (2 * entry.heads):
            wrong.append(f"{name} with {shape[0]} rows for {entry.heads} heads of even size")
    if wrong:
        msg = (
            f"{path} holds tensors that can't be: {'; '.join(wrong[:8])}. A row must be whole blocks, "
            "and a projection whole heads. The file is damaged: download it again."
        )
        raise ModelError(msg)


def _unsupported(kind: int) -> str | None:
    """The name of a format that can't be read; None for one that can."""
    if kind in DENSE or kind in BLOCK_BYTES:
        return None
    import gguf

    try:
        known = gguf.GGMLQuantizationType(kind)
        _, size = gguf.GGML_QUANT_SIZES[known]
        gguf.dequantize(np.zeros((1, size), dtype=np.uint8), known)
    except ValueError:
        return f"format {kind}"
    except NotImplementedError:
        return known.name
    return None
