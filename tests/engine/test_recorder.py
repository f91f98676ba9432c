"""CudaRecorder with a device of our own in place of CUDA: what it counts, and what a failure leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from paceline.engine.graphs import CudaRecorder
from paceline.engine.step_tensors import StepTensors

MB = 1 << 20
GPU = torch.device("cuda", 0)
TENSORS = StepTensors(
    emitted=torch.zeros(1, 1, dtype=torch.int64),
    path=None,
    sources=None,
    drafted=None,
    logprobs=None,
    top_ids=None,
    top_logprobs=None,
)


class Stream:
    """A stream that does nothing."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        """Nothing runs, so nothing is waited for."""

    def synchronize(self) -> None:
        """As for `wait_stream`."""


class Device:
    """Free and cached bytes, pools, and the current stream; the parts of `torch.cuda` over them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.cached = 1000 * MB, 0
        self.pools = 0
        self.used_pools: list[int] = []
        self.capturing = False
        self.current = self.default = Stream()
        self.capture_streams: list[Stream] = []
        self.lost = False  # the end of a failed capture does not restore the stream
        for name in ("Stream", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, {"Stream": Stream, "CUDAGraph": object}[name])
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.new_pool)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (self.free, 2000 * MB))
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    def empty(self) -> None:
        self.free, self.cached = self.free + self.cached, 0

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(
        self, _: object, *, pool: int, stream: Stream, capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.empty()
        self.used_pools.append(pool)
        self.capture_streams.append(stream)
        before, self.current, self.capturing = self.current, stream, True
        try:
            yield
        except RuntimeError:
            self.lost = True
            raise
        finally:
            self.capturing = False
            if not self.lost:
                self.current = before

    def step(
        self, *, fails: bool = False, error: type[BaseException] = torch.OutOfMemoryError
    ) -> Any:
        """A step that needs 50 MB when it runs, and 7 MB for good when it is captured."""

        def step() -> StepTensors:
            if self.capturing and fails:
                raise error("CUDA out of memory")
            if self.capturing:
                self.free -= 7 * MB
            elif self.cached < 50 * MB:
                self.free -= 50 * MB - self.cached
                self.cached = 50 * MB
            return TENSORS

        return step


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device at rest."""
    return Device(monkeypatch)


def test_bytes_are_what_the_graph_keeps(device: Device) -> None:
    """Neither the work space of the warm-ups, nor what was cached before."""
    device.cached, device.free = 300 * MB, 700 * MB
    recorder = CudaRecorder(GPU)
    first, second = recorder.record(device.step()), recorder.record(device.step())
    assert (first.nbytes, second.nbytes) == (7 * MB, 7 * MB)
    assert device.free == (1000 - 2 * 7) * MB
    assert len(set(device.used_pools)) == 1, "all graphs share their memory"
    assert len(set(device.capture_streams)) == 1
    assert device.current is device.default


def test_a_failure_leaves_the_stream_and_a_pool_to_go_on_with(device: Device) -> None:
    """A pool that held nothing but a failure is given up by PyTorch; one with graphs stays."""
    recorder = CudaRecorder(GPU)
    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(device.step(fails=True))
    assert device.current is device.default
    device.lost = False
    recorder.record(device.step())
    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(device.step(fails=True))
    device.lost = False
    recorder.record(device.step())
    first, *others = device.used_pools
    assert first not in others
    assert len(set(others)) == 1
    assert device.current is device.default


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_capture_leaves_a_pool_to_go_on_with(
    device: Device, error: type[BaseException]
) -> None:
    """Whatever ends the first capture, its pool is gone with it."""
    recorder = CudaRecorder(GPU)
    with pytest.raises(error):
        recorder.record(device.step(fails=True, error=error))
    recorder.record(device.step())
    first, second = device.used_pools
    assert first != second
