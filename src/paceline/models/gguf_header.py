"""The header of a GGUF file: keys, values and the table of tensors, read without reading tensors.

For: what is needed at start-up, the model's shape and its tokenizer. The `gguf` package wraps every
string of an array in its own numpy view, which takes seconds for a vocabulary; here a vocabulary of
49,152 tokens takes about 50 ms, so nothing has to be cached.
Not for: the tensors' bytes, quantised formats or writing; the `gguf` package does those.

Format: GGUF versions 2 and 3, little-endian. A header (magic, version, number of tensors, number of
keys) is followed by the keys, each a string, a type and a value; a string is a 64-bit length and
UTF-8 bytes, an array an element type, a 64-bit length and the elements. Then follow the tensors, each
a name, its dimensions (fastest first), a type and the offset of its bytes from the start of the data,
which begins at the next multiple of the alignment.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from paceline.core.errors import ModelError

GGUFScalar: TypeAlias = str | int | float | bool
GGUFValue: TypeAlias = "GGUFScalar | list[GGUFValue]"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MAX_ARRAY_DEPTH = 4  # nested arrays are legal; deeper than this is damage
_MAX_DIMENSIONS = 4  # of a tensor, by the specification
_ALIGNMENT = 32  # where the file names none


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """Where one tensor lies in the file."""

    kind: int  # GGML's number of the format
    shape: tuple[int, ...]  # as torch has it: [rows, columns] of a matrix
    offset: int  # bytes from the start of the file


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFHeader:
    """Everything before the tensors' bytes."""

    metadata: Mapping[str, GGUFValue]
    tensors: Mapping[str, GGUFTensor]


def read_gguf_metadata(path: str | os.PathLike[str]) -> dict[str, GGUFValue]:
    """Return all key-value pairs of a GGUF file, in file order.

    Args:
        path: the file.

    Raises:
        ModelError: as `read_gguf_header`.
    """
    return dict(read_gguf_header(path).metadata)


def read_gguf_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Return the key-value pairs and the table of tensors of a GGUF file, in file order.

    Args:
        path: the file.

    Raises:
        ModelError: the file cannot be read, is no GGUF, has an unsupported version, or ends before
            its header does.
    """
    file = Path(path)
    try:
        with (
            file.open("rb") as handle,
            mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _read(data)
    except OSError as error:
        msg = (
            f"cannot read the GGUF file {file}: {error.strerror or error}; "
            "a readable local file is needed; check the path and its permissions"
        )
        raise ModelError(msg) from error
    except (_DamagedError, UnicodeDecodeError, ValueError) as error:
        msg = (
            f"cannot read {file} as GGUF: {error}; little-endian GGUF versions "
            f"{' and '.join(map(str, _VERSIONS))} can be read; download the file again or convert "
            "the model with a current llama.cpp"
        )
        raise ModelError(msg) from error


class _DamagedError(Exception):
    """What is wrong with the bytes; turned into a `ModelError` that names the file."""


def _read(data: mmap.mmap) -> GGUFHeader:
    if data[:4] != _MAGIC:
        msg = f"it starts with {data[:4]!r} instead of {_MAGIC!r}"
        raise _DamagedError(msg)
    cursor = _Cursor(data)
    cursor.position = len(_MAGIC)
    version = cursor.unpack(_U32)
    if version not in _VERSIONS:
        msg = f"its version is {version}"
        raise _DamagedError(msg)
    num_tensors = int(cursor.unpack(_U64))
    num_keys = int(cursor.unpack(_U64))
    pairs: dict[str, GGUFValue] = {}
    for _ in range(num_keys):
        key = cursor.string()
        pairs[key] = cursor.value(int(cursor.unpack(_U32)), depth=0)
    listed = [(cursor.string(), cursor.tensor()) for _ in range(num_tensors)]
    alignment = pairs.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        msg = f"its alignment is {alignment!r}"
        raise _DamagedError(msg)
    start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: GGUFTensor(kind=kind, shape=shape, offset=start + offset)
        for name, (kind, shape, offset) in listed
    }
    return GGUFHeader(metadata=pairs, tensors=tensors)


class _Cursor:
    """Reads forward through the mapped file; every read checks that the bytes exist."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def unpack(self, layout: struct.Struct) -> int | float | bool:
        start = self._advance(layout.size)
        value: int | float | bool = layout.unpack_from(self.data, start)[0]
        return value

    def string(self) -> str:
        length = int(self.unpack(_U64))
        start = self._advance(length)
        return str(self.data[start : start + length], "utf-8")

    def value(self, kind: int, *, depth: int) -> GGUFValue:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])
        msg = f"there is a value of unknown type {kind} at byte {self.position}"
        raise _DamagedError(msg)

    def tensor(self) -> tuple[int, tuple[int, ...], int]:
        """Return (kind, shape, offset from the start of the data)."""
        num_dimensions = int(self.unpack(_U32))
        if num_dimensions > _MAX_DIMENSIONS:
            msg = f"a tensor has {num_dimensions} dimensions at byte {self.position}"
            raise _DamagedError(msg)
        dimensions = [int(self.unpack(_U64)) for _ in range(num_dimensions)]
        kind, offset = int(self.unpack(_U32)), int(self.unpack(_U64))
        return kind, tuple(reversed(dimensions)), offset

    def _array(self, depth: int) -> list[GGUFValue]:
        if depth > _MAX_ARRAY_DEPTH:
            msg = f"arrays are nested deeper than {_MAX_ARRAY_DEPTH} at byte {self.position}"
            raise _DamagedError(msg)
        kind, length = int(self.unpack(_U32)), int(self.unpack(_U64))
        if kind in _SCALARS:
            layout = _SCALARS[kind]
            start = self._advance(length * layout.size)
            return list(struct.unpack_from(f"<{length}{layout.format[1:]}", self.data, start))
        if kind == _STRING:
            return list(self._strings(length))
        return [self.value(kind, depth=depth) for _ in range(length)]

    def _strings(self, count: int) -> list[str]:
        """`count` strings; the same as so many calls of `string`, four times as quick."""
        data, position, end, length_of = self.data, self.position, len(self.data), _U64.unpack_from
        found = []
        for _ in range(count):
            start = position + _U64.size
            stop = start + length_of(data, position)[0] if start <= end else end + 1
            if stop > end:
                self.position = position
                self.string()  # says what is wrong
            found.append(str(data[start:stop], "utf-8"))
            position = stop
        self.position = position
        return found

    def _advance(self, num_bytes: int) -> int:
        start = self.position
        if num_bytes > len(self.data) - start:
            msg = (
                f"it ends inside its header: {num_bytes} bytes are wanted at byte {start} of "
                f"{len(self.data)}"
            )
            raise _DamagedError(msg)
        self.position = start + num_bytes
        return start
