"""The tensors of a GGUF file: blocks -> codes or plain tensors, converted once and kept.

Q4_0, Q4_1 and Q8_0 stay codes with their scales, so nothing is lost and a CPU can multiply with
them. F32, F16 and BF16 stay what they are. Other formats are dequantised by the package `gguf`, whose
plain numpy takes seconds, hence the cache. A converted file is named by the digest of the original
and appears complete or not at all. Where it can't be kept (read-only, full or missing folder), the
same conversion happens in memory, with a warning.

Letters: N rows, K columns, G = K / 32 groups of a row.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.models import checkpoint
from paceline.models.atomic import sweep
from paceline.models.cache import cache_folder, digest
from paceline.models.checkpoint import Checkpoint, TensorSource, TensorSpec
from paceline.models.gguf import Entry
from paceline.ops.packed import Groups

logger = logging.getLogger(__name__)

_FORMAT = "paceline-gguf-1"  # part of an entry's name: a new format never meets an old file
_GROUP = 32
_DENSE = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_Q4_0, _Q4_1, _Q8_0 = 2, 3, 8
_BLOCK_BYTES = {_Q4_0: 18, _Q4_1: 20, _Q8_0: 34}  # of 32 values
Bytes = NDArray[np.uint8]


class GGUFTensors:
    """A `TensorSource` that reads the file itself.

    Args:
        path: the file.
        entries: its tensors by checkpoint name.
        dtype: the network's dtype; formats that are dequantised are rounded to it once.

    Raises:
        ModelError: a tensor's format is not supported (all of them are named), or the file ends
            before its tensors do.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry], dtype: torch.dtype) -> None:
        self.where = path
        self.shapes = {name: entry.tensor.shape for name, entry in entries.items()}
        self._entries = entries
        self._dtype = dequantised_dtype(dtype)
        _refuse_unsupported(path, entries)
        _refuse_misshapen(path, entries)
        size = path.stat().st_size
        end = max((e.tensor.offset + _nbytes(e) for e in entries.values()), default=0)
        if end > size:
            msg = (
                f"{path} is truncated: its tensors need {end:,} bytes, it has {size:,}; a complete "
                "file is needed. Download it again."
            )
            raise ModelError(msg)
        self._data = np.memmap(path, dtype=np.uint8, mode="r")

    def read(self, name: str) -> Tensor | Groups:
        """One tensor, in memory of its own, or quantised groups."""
        return decode(self._entries[name].tensor.kind, self.parts(name))

    def kind(self, name: str) -> int:
        """GGML's number of a tensor's format."""
        return self._entries[name].tensor.kind

    def specs(self, name: str) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(suffix, dtype, shape) of the parts that a tensor is kept as."""
        tensor = self._entries[name].tensor
        if tensor.kind not in _BLOCK_BYTES:
            return [("", _DENSE.get(tensor.kind, self._dtype), tensor.shape)]
        *rows, columns = tensor.shape
        codes = columns if tensor.kind == _Q8_0 else columns // 2
        side = ("", torch.float16, (*rows, columns // _GROUP))
        kind = torch.int8 if tensor.kind == _Q8_0 else torch.uint8
        found = [("#codes", kind, (*rows, codes)), ("#scales", *side[1:])]
        return [*found, ("#mins", *side[1:])] if tensor.kind == _Q4_1 else found

    def parts(self, name: str) -> dict[str, Tensor]:
        """The parts themselves, by suffix, with rows in the checkpoint's order."""
        entry = self._entries[name]
        *rows, _ = entry.tensor.shape or (1, 1)
        start = entry.tensor.offset
        raw: Bytes = np.array(self._data[start : start + _nbytes(entry)])
        if (
            entry.heads is not None
        ):  # undo the converter's order: (head, pair, half) -> (head, half, pair)
            count = entry.tensor.shape[0]
            order = np.arange(count).reshape(entry.heads, -1, 2).swapaxes(1, 2).reshape(-1)
            raw = raw.reshape(count, -1)[order].reshape(-1)
        kind = entry.tensor.kind
        if kind in _DENSE:
            return {"": torch.from_numpy(raw).view(_DENSE[kind]).view(entry.tensor.shape)}
        if kind in _BLOCK_BYTES:
            return _blocks(kind, raw.reshape(*rows, -1, _BLOCK_BYTES[kind]))
        import gguf

        dense = gguf.dequantize(raw.reshape(*rows, -1), gguf.GGMLQuantizationType(kind))
        return {"": torch.from_numpy(dense).to(self._dtype)}


class ConvertedTensors:
    """A `TensorSource` over a converted file.

    Args:
        path: the converted file.
        where: the GGUF file that it was made from, for messages.

    Raises:
        ModelError: it is damaged, or not one of ours.
    """

    def __init__(self, path: Path, where: Path) -> None:
        self.where = where
        self._file = Checkpoint(path)
        try:
            table = json.loads(self._file.metadata[_FORMAT])
            self._kinds = {str(name): int(kind) for name, (kind, _) in table.items()}
            self.shapes = {str(name): tuple(map(int, shape)) for name, (_, shape) in table.items()}
        except (KeyError, ValueError, TypeError) as error:
            msg = f"{path} is no converted model of this version; it can be deleted."
            raise ModelError(msg) from error

    def read(self, name: str) -> Tensor | Groups:
        """One tensor, in memory of its own, or quantised groups."""
        suffixes = ("", "#codes", "#scales", "#mins")
        names = [suffix for suffix in suffixes if name + suffix in self._file.shapes]
        return decode(self._kinds[name], {s: self._file.read(name + s) for s in names})


def open_gguf(
    path: Path, entries: Mapping[str, Entry], dtype: torch.dtype
) -> tuple[TensorSource, str]:
    """The tensors of a GGUF file, from the cache if they were converted before.

    Args:
        path: the file.
        entries: its tensors by checkpoint name.
        dtype: the network's dtype.

    Returns:
        The tensors, and a line for people: where they came from.

    Raises:
        ModelError: the file is truncated or has a format that is not supported.
    """
    try:
        folder = cache_folder()
        target = folder / _entry_name(digest(path), entries, dtype)
        if target.exists():
            try:
                return ConvertedTensors(target, path), f"weights: converted before, in {target}"
            except ModelError as error:
                logger.warning("%s; converting again", error)
        source = GGUFTensors(path, entries, dtype)
        logger.info("converting %s, once", path)
        sweep(folder)
        convert(source, target)
        return ConvertedTensors(target, path), f"weights: converted now, kept in {target}"
    except OSError as error:
        logger.warning(
            "the converted model can't be kept (%s); converting in memory at every start. Free "
            "space, or set PACELINE_CACHE to a writable folder",
            error,
        )
        note = f"weights: converted in memory, as the cache folder does not work ({error})"
        return GGUFTensors(path, entries, dtype), note


def convert(source: GGUFTensors, target: Path) -> None:
    """Write a GGUF file's tensors as one safetensors file, atomically, one tensor at a time.

    Raises:
        OSError: the folder is missing, read-only or full; nothing is left.
    """

    def width(name: str) -> int:  # wider first, so that all data is aligned
        return max(dtype.itemsize for _, dtype, _ in source.specs(name))

    names = sorted(source.shapes, key=width, reverse=True)
    specs = [
        TensorSpec(name=name + suffix, dtype=dtype, shape=shape)
        for name in names
        for suffix, dtype, shape in source.specs(name)
    ]

    def tensors() -> Iterator[Tensor]:
        for name in names:
            parts = source.parts(name)
            yield from (parts[suffix] for suffix, _, _ in source.specs(name))

    table = {name: (source.kind(name), source.shapes[name]) for name in names}
    checkpoint.write(target, specs, tensors(), {_FORMAT: json.dumps(table)})


def decode(kind: int, parts: Mapping[str, Tensor]) -> Tensor | Groups:
    """Parts as they are kept -> a plain tensor or groups.

    Scales and mins of 4-bit formats are widened to float32: -8 * scale may leave float16's range.
    """
    if kind not in _BLOCK_BYTES:
        return parts[""]
    codes, scales = parts["#codes"], parts["#scales"]
    if kind == _Q8_0:
        return Groups(codes=codes, scales=scales, mins=None, size=_GROUP, bits=8)
    # A block's low nibbles are its first half, its high nibbles the second.
    halves = codes.view(*codes.shape[:-1], -1, _GROUP // 2)
    codes = torch.cat((halves & 15, halves >> 4), dim=-1).flatten(-2)
    scales = scales.float()
    mins = parts["#mins"].float() if kind == _Q4_1 else scales * -8
    return Groups(codes=codes, scales=scales, mins=mins, size=_GROUP, bits=4)


def dequantised_dtype(dtype: torch.dtype) -> torch.dtype:
    """What formats without codes are kept in: the network's dtype, float32 if that is wider."""
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


def _blocks(kind: int, blocks: Bytes) -> dict[str, Tensor]:
    """Split blocks [N, G, bytes] into codes [N, K or K/2] and scales and mins [N, G] float16."""

    def halves(start: int) -> Tensor:
        column = np.ascontiguousarray(blocks[..., start : start + 2])
        return torch.from_numpy(column.view(np.float16)[..., 0])

    first = 4 if kind == _Q4_1 else 2
    codes = torch.from_numpy(np.ascontiguousarray(blocks[..., first:])).flatten(-2)
    if kind == _Q8_0:
        return {"#codes": codes.view(torch.int8), "#scales": halves(0)}
    found = {"#codes": codes, "#scales": halves(0)}
    return found | {"#mins": halves(2)} if kind == _Q4_1 else found


def _entry_name(key: str, entries: Mapping[str, Entry], dtype: torch.dtype) -> str:
    """Name in the cache; the dtype is part of it only where something is rounded to it."""
    exact = all(e.tensor.kind in _DENSE or e.tensor.kind in _BLOCK_BYTES for e in entries.values())
    suffix = "" if exact else f"-{str(dequantised_dtype(dtype)).removeprefix('torch.')}"
    return f"{key}{suffix}.{_FORMAT}.safetensors"


def _nbytes(entry: Entry) -> int:
    """Bytes of a tensor in the file."""
    import gguf

    kind = gguf.GGMLQuantizationType(entry.tensor.kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(entry.tensor.shape) // block * size


def _refuse_unsupported(path: Path, entries: Mapping[str, Entry]) -> None:
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


def _refuse_misshapen(path: Path, entries: Mapping[str, Entry]) -> None:
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
    if kind in _DENSE or kind in _BLOCK_BYTES:
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
