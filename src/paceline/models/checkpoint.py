"""Tensors of a checkpoint on disk: one safetensors file, or shards with an index.

Reading is lazy, one tensor at a time, so that a model is never held twice. Writing streams: the
header comes first, since shapes are known, then one tensor after the other.

The format: 8 bytes of header length, a JSON header (name -> dtype, shape, offsets), the bytes.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.models.atomic import replacing
from paceline.ops.packed import Groups

INDEX = "model.safetensors.index.json"
_NUMBERED = re.compile(r"-\d+-of-\d+\.safetensors$")
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorSource(Protocol):
    """Where a loader takes tensors from."""

    @property
    def where(self) -> Path:
        """Folder or file, for messages."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape, by checkpoint name."""
        ...

    def read(self, name: str) -> Tensor | Groups:
        """One tensor, in memory of its own, or quantised groups."""
        ...


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...


class _Shard(Protocol):
    """What is used of safetensors' untyped file."""

    def keys(self) -> list[str]: ...
    def metadata(self) -> dict[str, str] | None: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> Tensor: ...


class Checkpoint:
    """The safetensors of a folder, or one safetensors file.

    Args:
        path: a folder with model.safetensors, or with shards and their index; or a file.
        remedy: what to do about a damaged file, for the message.

    Raises:
        ModelError: a file is missing, damaged or truncated; every one is named.
    """

    def __init__(self, path: Path, *, remedy: str = "Download it again.") -> None:
        self.where = path
        files, chosen = _shards(path) if path.is_dir() else ([path], {})
        self._shards = {file.name: _open(file, remedy) for file in files}
        self._homes: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file, shard in self._shards.items():
            for name in shard.keys():  # noqa: SIM118 (no mapping)
                if chosen.get(name, file) == file:
                    self._homes[name] = file
                    self.shapes[name] = tuple(shard.get_slice(name).get_shape())

    @property
    def metadata(self) -> Mapping[str, str]:
        """The free text of the first file's header."""
        return next(iter(self._shards.values())).metadata() or {}

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, in its file's dtype, in memory of its own.

        A copy, because what safetensors returns may be a view of the mapped file: a model must not
        change, or end in a bus error, when its file does.
        """
        return self._shards[self._homes[name]].get_tensor(name).clone()


def _shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of a folder, and, from the index, the file of each tensor."""
    index = folder / INDEX
    if index.is_file():
        try:
            found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            chosen = {str(name): Path(str(file)).name for name, file in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            msg = (
                f"{index} is unreadable ({error!r}); it must map every tensor to its shard under "
                "'weight_map'. Download it again."
            )
            raise ModelError(msg) from error
        files = [folder / name for name in sorted(set(chosen.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            msg = (
                f"{folder} lacks {len(missing)} of the {len(files)} shards that its index names: "
                f"{', '.join(missing)}. All are needed. Download these files again."
            )
            raise ModelError(msg)
        return files, chosen
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole], {}
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1 and not _NUMBERED.search(files[0].name):
        return files, {}
    if files:
        msg = (
            f"{folder} holds {', '.join(file.name for file in files)} but no {INDEX}; several "
            "shards need their index. Download it too."
        )
        raise ModelError(msg)
    pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pth"))
    reason = (
        "only pickled weights, which are not read because they can run code"
        if pickled
        else "no weights"
    )
    msg = (
        f"{folder} holds {reason}; needed is model.safetensors, or shards with {INDEX}. "
        "Download these, or convert the weights to safetensors."
    )
    raise ModelError(msg)


def _open(file: Path, remedy: str) -> _Shard:
    """Open one file; safetensors checks that header and length agree."""
    try:
        return cast("_Shard", safe_open(str(file), framework="pt", device="cpu"))
    except (OSError, SafetensorError) as error:
        msg = (
            f"{file} is missing, damaged or truncated ({error}; {_size(file)}); a complete "
            f"safetensors file is needed. {remedy}"
        )
        raise ModelError(msg) from error


def _size(file: Path) -> str:
    try:
        return f"{file.stat().st_size:,} bytes"
    except OSError:
        return "no file"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, dtype and shape of a tensor that is about to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(
    path: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file, atomically, holding one tensor at a time.

    Args:
        path: the file; it appears complete or not at all.
        specs: every tensor, in the order in which they come; wider dtypes first, so that data is
            aligned.
        tensors: as many tensors, of those dtypes and shapes.
        metadata: free text for the header.

    Raises:
        OSError: the folder is missing, read-only or full.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata or {})}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for spec, tensor in zip(specs, tensors, strict=True):
            assert tensor.dtype == spec.dtype, f"{spec.name}: dtype"
            assert tuple(tensor.shape) == spec.shape, f"{spec.name}: shape"
            flat = tensor.detach().cpu().contiguous().flatten()
            file.write(flat.view(torch.uint8).numpy().data)
