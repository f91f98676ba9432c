"""How stages tell a person how far they are: a bar on a terminal, lines elsewhere; the caller decides."""

from __future__ import annotations

import logging
import time
from typing import Protocol

log = logging.getLogger(__name__)


class Progress(Protocol):
    """Told how far a stage has come, as often as it likes."""

    def __call__(self, what: str, done: float, total: float, note: str) -> None:
        """`done` of `total` (0: not known yet), and a few words."""
        ...


class LogLines:
    """Lines in the log, not more often than every so many seconds and stage.

    Args:
        every: seconds.
    """

    def __init__(self, every: float = 10.0) -> None:
        self._every = every
        self._last: dict[str, float] = {}

    def __call__(self, what: str, done: float, total: float, note: str) -> None:
        """See `Progress`."""
        now = time.monotonic()
        if now - self._last.get(what, -self._every) >= self._every or done >= total > 0:
            self._last[what] = now
            log.info("%s: %.0f of %s; %s", what, done, f"{total:.0f}" if total else "?", note)
