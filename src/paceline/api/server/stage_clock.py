"""StageClock: tells how long the parts of a step take, on the engine's thread.

A `core.stages.Stages` for a server that runs for weeks: nothing is kept, and a part costs two looks at
the clock and a call. It measures the host: on a CPU that is the part itself, on a GPU its launch.
Not for: measuring a GPU (profiling/timeline.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType


class _Part(AbstractContextManager[None]):
    """One part's context, used again and again; parts of one name do not lie within one another."""

    def __init__(self, name: str, clock: StageClock) -> None:
        self._name = name
        self._clock = clock
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._clock.tell(self._name, time.perf_counter() - self._start)


class StageClock:
    """Tells `tell(name, seconds)`; nobody is told until that is set."""

    def __init__(self) -> None:
        self.tell: Callable[[str, float], object] = lambda _name, _seconds: None
        self._parts: dict[str, _Part] = {}

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Implement `Stages`."""
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = _Part(name, self)
        return part
