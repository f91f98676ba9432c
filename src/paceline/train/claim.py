"""One training in a folder at a time, and nothing left of a first call that was refused.

The folder itself is locked, where the system can lock one, so no file is left behind; the lock ends with
the process, however that ends.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.train.prepare import partial_folder
from paceline.train.settle import SETTINGS
from paceline.train.trainer import STATE

log = logging.getLogger(__name__)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Have a run's folder to oneself; made if it is missing.

    If the work ends with an error in a run's first call, before anything was computed, its settings are
    forgotten: they would bind the next call, and were refused.

    Raises:
        ConfigError: another process trains in it.
        OSError: it can't be made, or is no folder.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = _locked(folder)
    try:
        first = not (folder / SETTINGS).exists()
        try:
            yield
        except Exception:
            if first and not _computed(folder):
                _forget(folder, made=made)
            raise
    finally:
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """The descriptor that holds the lock; None where folders can't be locked."""
    try:
        fcntl: Any = importlib.import_module("fcntl")
    except ImportError:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        msg = (
            f"another process trains in {folder}; a folder takes one at a time. Wait until it has "
            f"ended, or use another folder, with --answers {folder} to train on the same answers"
        )
        raise ConfigError(msg) from None
    except OSError as error:  # some network file systems
        os.close(descriptor)
        log.debug("%s can't be locked: %s", folder, error)
        return None
    return descriptor


def _computed(folder: Path) -> bool:
    """Whether there is something that was made by the settings of the first call."""
    made = (folder / "prompts", folder / STATE)
    return any(path.exists() for path in made) or any(folder.glob("answers/docs-*.npy"))


def _forget(folder: Path, *, made: bool) -> None:
    (folder / SETTINGS).unlink(missing_ok=True)
    shutil.rmtree(partial_folder(folder / "prompts"), ignore_errors=True)
    if made:
        with contextlib.suppress(OSError):  # something else is in it
            folder.rmdir()
