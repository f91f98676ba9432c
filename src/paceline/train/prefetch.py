"""Batches made ahead of time by a thread, in memory that a GPU can copy from by itself."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

if TYPE_CHECKING:
    from paceline.train.packing import Batch, Packer

_AHEAD = 3


class Prefetch:
    """The batches of steps `first`, `first + 1`, ...; a context manager.

    Args:
        packer: makes them.
        first: step of the first one.
        device: where they go.
    """

    def __init__(self, packer: Packer, first: int, device: torch.device) -> None:
        self._packer, self._device, self._next = packer, device, first
        # One worker: the packer keeps an epoch's plan and is not to be shared.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._made: deque[Future[tuple[Batch, int]]] = deque()

    def __enter__(self) -> Self:
        for _ in range(_AHEAD):
            self._ask()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self) -> tuple[Batch, int]:
        """The next batch, on the device, and how many real anchors it has."""
        batch, alive = self._made.popleft().result()
        self._ask()
        return batch.to(self._device), alive

    def _ask(self) -> None:
        self._made.append(self._pool.submit(self._make, self._next))
        self._next += 1

    def _make(self, step: int) -> tuple[Batch, int]:
        batch = self._packer.batch(step)
        alive = int(batch.alive.sum())
        return (batch.pinned() if self._device.type == "cuda" else batch), alive
