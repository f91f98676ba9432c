"""Timeline: how long each part of a step takes, on the device's own clock.

A listener for `core.stages`. On a CUDA device a part is what lies between two events on the stream: its
kernels, and where the host is too slow, the gaps in which the device waits for the next one. Nothing
waits for the device until `read`. On a CPU it is wall time.

Not for steps that run as captured graphs: the parts of a graph cannot be told apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch


class Timeline:
    """A `Stages` that sums seconds by part. Parts may lie within one another.

    Args:
        device: where the parts run.
    """

    def __init__(self, device: torch.device) -> None:
        self._mark: Callable[[], torch.cuda.Event | float] = (
            _event if device.type == "cuda" else time.perf_counter
        )
        self._spans: list[tuple[str, torch.cuda.Event | float, torch.cuda.Event | float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the part `name`."""
        start = self._mark()
        yield
        self._spans.append((name, start, self._mark()))

    def read(self) -> Mapping[str, float]:
        """Seconds by part since the last call, in the order in which parts first ended; waits."""
        spans, self._spans = self._spans, []
        seconds: dict[str, float] = {}
        for name, start, stop in spans:
            seconds[name] = seconds.get(name, 0.0) + _between(start, stop)
        return seconds


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between(start: torch.cuda.Event | float, stop: torch.cuda.Event | float) -> float:
    """Seconds from one mark to the other."""
    if isinstance(start, float) or isinstance(stop, float):
        assert isinstance(start, float), "marks are of one kind"
        assert isinstance(stop, float), "marks are of one kind"
        return stop - start
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
