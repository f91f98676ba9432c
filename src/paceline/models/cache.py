"""The folder where converted models are kept, and the digests that its entries are named by.

An entry's name starts with the SHA-256 of the file that it was made from, so it can't go stale and
may be shared by any number of processes. The digest itself is remembered by path, size and
modification time, so that a second start does not read the whole file again. Beside an entry lies the
CRC-32 of its bytes, compared at every start: a disk or a program may have damaged it since.

`PACELINE_CACHE` moves the folder (default: ~/.cache/paceline).
"""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import zlib
from pathlib import Path

from paceline.core import environment
from paceline.core.errors import ModelError
from paceline.models.atomic import replacing

logger = logging.getLogger(__name__)

_HEX_LEN = 64
_PIECE = 1 << 20  # bytes read at once: they stay in the processor's cache


def cache_folder() -> Path:
    """Return the cache folder, made if it was missing.

    Raises:
        OSError: it can't be made, or is not a folder.
    """
    folder = environment.cache_path()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def remedy(error: OSError) -> str:
    """What helps where the cache folder does not work: room helps a full disk alone."""
    full = error.errno in {errno.ENOSPC, errno.EDQUOT}
    return ("Free space, or set" if full else "Set") + " PACELINE_CACHE to a writable folder"


def digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; remembered in the cache folder where that works.

    Raises:
        OSError: the file can't be read.
    """
    path = path.resolve()
    stat = path.stat()
    return _digest(path, stat.st_size, stat.st_mtime_ns)


def folder_digest(folder: Path) -> str:
    """One SHA-256 for config.json and all safetensors of a folder, under their names; as `digest`.

    Raises:
        OSError: one of them can't be read, or there is no config.json.
    """
    paths = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    lines = [f"{digest(path)} {path.name}\n" for path in paths]
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def keep_sum(entry: Path) -> None:
    """Write down the checksum of an entry that was just made.

    Raises:
        OSError: it can't be read, or the folder can't be written.
    """
    with replacing(_sum_path(entry)) as out:
        out.write(_crc(entry).encode("ascii"))


def check_sum(entry: Path) -> None:
    """Refuse an entry whose bytes are not those that were written.

    Not a safeguard against an attacker, who could write the sum too.

    Raises:
        ModelError: as above, or there is no checksum.
        OSError: the entry can't be read.
    """
    try:
        known = _sum_path(entry).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        msg = f"{entry} has no readable checksum beside it"
        raise ModelError(msg) from None
    if _crc(entry) != known:
        msg = f"{entry} is damaged: it does not match its checksum"
        raise ModelError(msg)


def _sum_path(entry: Path) -> Path:
    return entry.with_suffix(".crc32")


def _crc(path: Path) -> str:
    """CRC-32 of a file, in hexadecimal: 2 GB/s and more, several times as fast as SHA-256."""
    found, piece = 0, memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(piece):
            found = zlib.crc32(piece[:size], found)
    return f"{found:08x}"


@functools.lru_cache(maxsize=64)
def _digest(path: Path, size: int, mtime_ns: int) -> str:
    memo = _memo(path, size, mtime_ns)
    if memo is not None:
        try:
            known = memo.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            known = ""
        if len(known) == _HEX_LEN:
            return known
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if memo is not None:
        try:
            memo.parent.mkdir(exist_ok=True)
            with replacing(memo) as out:
                out.write(found.encode("ascii"))
        except OSError as error:
            logger.debug("digest of %s is not remembered: %s", path, error)
    return found


def _memo(path: Path, size: int, mtime_ns: int) -> Path | None:
    """Where the digest of exactly this state of the file is remembered; None without a cache."""
    key = hashlib.sha256(f"{path}\0{size}\0{mtime_ns}".encode(errors="surrogateescape"))
    try:
        return cache_folder() / "digests" / key.hexdigest()
    except OSError:
        return None
