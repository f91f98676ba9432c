from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf import GGUFReader

from paceline.core.errors import ModelError
from paceline.models.gguf_header import read_gguf_metadata
from tests import tiny_tokenizers

EVERY_KIND = {
    "general.architecture": "llama",
    "a.string": "grüße 👋",
    "a.bool": True,
    "an.int": 7,
    "a.float": 1.5,
    "strings": ["a", "", "Ġt he"],
    "ints": [1, -2, 3],
    "floats": [0.5, -1.0],
}


def pack_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(*pairs: bytes, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, 0, len(pairs)) + b"".join(pairs)


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    """Values are those the `gguf` package wrote, in order."""
    file = tiny_tokenizers.write_gguf(tmp_path / "m.gguf", EVERY_KIND)
    found = read_gguf_metadata(file)
    assert found == EVERY_KIND
    assert list(found) == list(EVERY_KIND)


@pytest.mark.parametrize(
    "kind,layout,value",
    [
        (0, "<B", 200),
        (1, "<b", -3),
        (2, "<H", 60_000),
        (3, "<h", -300),
        (4, "<I", 1 << 31),
        (5, "<i", -(1 << 20)),
        (6, "<f", 0.25),
        (7, "<?", True),
        (10, "<Q", 1 << 63),
        (11, "<q", -(1 << 40)),
        (12, "<d", 1e300),
    ],
)
def test_every_number_type_is_read(tmp_path: Path, kind: int, layout: str, value: float) -> None:
    """All number types of the format are known, alone and in an array."""
    alone = pack_string(b"x") + struct.pack("<I", kind) + struct.pack(layout, value)
    array = pack_string(b"y") + struct.pack("<IIQ", 9, kind, 2) + struct.pack(layout, value) * 2
    (tmp_path / "m.gguf").write_bytes(header(alone, array))
    assert read_gguf_metadata(tmp_path / "m.gguf") == {"x": value, "y": [value, value]}


def test_the_bundled_model_reads_as_the_gguf_package_reads_it() -> None:
    """The quick reader and the official one agree on a real file."""
    file = tiny_tokenizers.bundled_file()
    ours = read_gguf_metadata(file)
    theirs = {
        key: field.contents()
        for key, field in GGUFReader(file).fields.items()
        if not key.startswith("GGUF.")
    }
    assert ours == theirs


def test_every_truncation_is_reported(tmp_path: Path) -> None:
    """A partly downloaded file is refused wherever it ends, never half read."""
    whole = tiny_tokenizers.write_gguf(tmp_path / "whole.gguf", EVERY_KIND).read_bytes()
    # The writer pads behind the header; the floats at its end are the last bytes that matter.
    end = whole.rindex(struct.pack("<ff", 0.5, -1.0)) + 8
    part = tmp_path / "part.gguf"
    for length in range(end):
        part.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"part\.gguf.* download the file again"):
            read_gguf_metadata(part)
    part.write_bytes(whole[:end])
    assert read_gguf_metadata(part) == EVERY_KIND


@pytest.mark.parametrize(
    "content,says",
    [
        (header(magic=b"GGML"), "starts with b'GGML'"),
        (header(version=1), "version is 1"),
        (header(version=0x03000000), "little-endian"),
        (header(pack_string(b"x") + struct.pack("<I", 77)), "unknown type 77"),
        (header(pack_string(b"\xff\xfe") + struct.pack("<IB", 0, 1)), "utf-8"),
        (header(pack_string(b"x") + struct.pack("<IIQ", 9, 0, 1 << 60)), "ends inside its header"),
        (header(pack_string(b"x") + struct.pack("<IIQ", 9, 8, 1 << 60)), "ends inside its header"),
        (header(pack_string(b"x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9), "nested"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    """A damaged file gives a clear error, quickly and without allocating what it claims to hold."""
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=says):
        read_gguf_metadata(tmp_path / "m.gguf")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A wrong path gives our own error with the path in it."""
    with pytest.raises(ModelError, match=r"nothing\.gguf.*check the path"):
        read_gguf_metadata(tmp_path / "nothing.gguf")
