"""The tensors of a GGUF file, converted once and kept.

Conversion takes seconds for some formats (gguf_blocks.py), hence the cache. A converted file is named by
the digest of the original and appears complete or not at all; one that was damaged since is made anew.
Where it can't be kept (read-only, full or
missing folder), the same conversion happens in memory, with a warning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.models import checkpoint
from paceline.models.atomic import sweep
from paceline.models.cache import cache_folder, check_sum, digest, keep_sum, remedy
from paceline.models.checkpoint import Checkpoint, TensorSource, TensorSpec
from paceline.models.gguf import Entry
from paceline.models.gguf_blocks import (
    BLOCK_BYTES,
    DENSE,
    GROUP,
    Q4_1,
    Q8_0,
    Bytes,
    decode,
    dequantised_dtype,
    nbytes,
    refuse_misshapen,
    refuse_unsupported,
    split_blocks,
)
from paceline.ops.packed import Groups

logger = logging.getLogger(__name__)

_FORMAT = "paceline-gguf-1"  # part of an entry's name: a new format never meets an old file


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
        refuse_unsupported(path, entries)
        refuse_misshapen(path, entries)
        size = path.stat().st_size
        end = max((e.tensor.offset + nbytes(e) for e in entries.values()), default=0)
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
        if tensor.kind not in BLOCK_BYTES:
            return [("", DENSE.get(tensor.kind, self._dtype), tensor.shape)]
        *rows, columns = tensor.shape
        codes = columns if tensor.kind == Q8_0 else columns // 2
        side = ("", torch.float16, (*rows, columns // GROUP))
        kind = torch.int8 if tensor.kind == Q8_0 else torch.uint8
        found = [("#codes", kind, (*rows, codes)), ("#scales", *side[1:])]
        return [*found, ("#mins", *side[1:])] if tensor.kind == Q4_1 else found

    def parts(self, name: str) -> dict[str, Tensor]:
        """The parts themselves, by suffix, with rows in the checkpoint's order."""
        entry = self._entries[name]
        *rows, _ = entry.tensor.shape or (1, 1)
        start = entry.tensor.offset
        raw: Bytes = np.array(self._data[start : start + nbytes(entry)])
        if (
            entry.heads is not None
        ):  # undo the converter's order: (head, pair, half) -> (head, half, pair)
            count = entry.tensor.shape[0]
            order = np.arange(count).reshape(entry.heads, -1, 2).swapaxes(1, 2).reshape(-1)
            raw = raw.reshape(count, -1)[order].reshape(-1)
        kind = entry.tensor.kind
        if kind in DENSE:
            return {"": torch.from_numpy(raw).view(DENSE[kind]).view(entry.tensor.shape)}
        if kind in BLOCK_BYTES:
            return split_blocks(kind, raw.reshape(*rows, -1, BLOCK_BYTES[kind]))
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
        self._file = Checkpoint(path, remedy="It is made anew.")
        try:
            table = json.loads(self._file.metadata[_FORMAT])
            self._kinds = {str(name): int(kind) for name, (kind, _) in table.items()}
            self.shapes = {str(name): tuple(map(int, shape)) for name, (_, shape) in table.items()}
        except (KeyError, ValueError, TypeError) as error:
            msg = f"{path} is no converted model of this version"
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
                check_sum(target)
                return ConvertedTensors(target, path), f"weights: converted before, in {target}"
            except ModelError as error:
                logger.warning("%s; converting again", error)
        source = GGUFTensors(path, entries, dtype)
        logger.info("converting %s, once", path)
        sweep(folder)
        convert(source, target)
        keep_sum(target)
        return ConvertedTensors(target, path), f"weights: converted now, kept in {target}"
    except OSError as error:
        logger.warning(
            "the converted model can't be kept (%s); converting in memory at every start. %s",
            error,
            remedy(error),
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


def _entry_name(key: str, entries: Mapping[str, Entry], dtype: torch.dtype) -> str:
    """Name in the cache; the dtype is part of it only where something is rounded to it."""
    exact = all(e.tensor.kind in DENSE or e.tensor.kind in BLOCK_BYTES for e in entries.values())
    suffix = "" if exact else f"-{str(dequantised_dtype(dtype)).removeprefix('torch.')}"
    return f"{key}{suffix}.{_FORMAT}.safetensors"
