"""The file that a server writes its port to, for whoever started it with port 0 and waits.

Only what is plainly an earlier server's port is ever removed; whatever else has that name stays, and is told
before a model is loaded for minutes.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

from paceline.core.errors import ConfigError

_LONGEST = 64  # bytes that are looked at
_PORT = re.compile(rb"\d{1,5}")


def check(path: str) -> None:
    """Refuse a place where no port can be written, or that holds something else.

    Raises:
        ConfigError: the folder is missing or not writable, or there is no port in what has that name.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise _refusal(path, f"there is no folder {target.parent}")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise _refusal(path, f"the folder {target.parent} is not writable")
    try:
        found = target.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise _refusal(path, str(error)) from error
    if not stat.S_ISREG(found.st_mode):
        raise _refusal(path, "what has that name is no regular file")
    try:
        with target.open("rb") as file:
            text = file.read(_LONGEST)
    except OSError as error:
        raise _refusal(path, str(error)) from error
    if text.strip() and _PORT.fullmatch(text.strip()) is None:
        raise _refusal(path, "it holds something else than a port, which would be lost")


def forget(path: str) -> None:
    """Remove what an earlier server left there: it would be taken for this one's.

    Raises:
        ConfigError: as `check`.
    """
    check(path)
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        raise _refusal(path, str(error)) from error


def write(path: str, port: int) -> None:
    """Write the port; the file appears whole.

    Raises:
        ConfigError: as `check`, or the disk is full; nothing is left there then.
    """
    check(path)
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with part.open(
            "x", encoding="ascii"
        ) as file:  # never through a link that somebody laid there
            file.write(f"{port}\n")
        part.replace(target)
    except OSError as error:
        if not isinstance(error, FileExistsError):
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        raise _refusal(path, str(error)) from error


def _refusal(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"port_file {path} cannot be written ({why}); name a new file in a folder of yours"
    )
