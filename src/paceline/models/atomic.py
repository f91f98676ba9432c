"""Replacing a file in one step: readers see the old file or the whole new one, never a part.

For everything that outlives a process: cache entries and saved checkpoints. A killed writer leaves a
`.partial` file, which nothing reads; `sweep` removes old ones.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SUFFIX = ".partial"
_STALE_SECONDS = 3600.0  # a live writer touches its file all the time


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`; on a clean exit it is synced and takes `path`'s place.

    Two writers at once are fine: each has its own temporary file, and the last to finish wins.

    Raises:
        OSError: the folder is missing, read-only or full. `path` is untouched, the temporary file
            is gone.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def sweep(folder: Path) -> None:
    """Remove temporary files that writers killed over an hour ago left in `folder`."""
    for partial in folder.glob(f".*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > _STALE_SECONDS:
                partial.unlink()


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
