"""Hardware: what a device can do at best, as measured on it; the ceilings of `model.py`.

Datasheets promise more than any program gets, so a ceiling is the best that a plain reading of memory
and a plain matrix product reach on the machine itself.

Letters: T rows of a product, K and N sizes of its weight.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_REPEATS = 7
_TINY_CALLS = 200
_RISE_ROWS = (1, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Measured ceilings of one device."""

    name: str
    read_bandwidth: float  # bytes a second
    matmul_rate: float  # operations a second, of large products in 16 bits
    launch: float | None = (
        None  # seconds of the least kernel of a captured graph, of a call on a CPU
    )
    # (T, time of products with T rows over reading alone): what the vendor's library reaches where
    # reading weights is the limit. Ascending; empty: 1 for any T.
    read_rise: tuple[tuple[int, float], ...] = ()

    def product_seconds(self, rows: int, nbytes: float, operations: float) -> float:
        """Least time of products with weights that are read once.

        Args:
            rows: T.
            nbytes: of the weights.
            operations: two a weight and row.
        """
        reading = nbytes / self.read_bandwidth * self._rise(rows)
        return max(reading, operations / self.matmul_rate)

    def _rise(self, rows: int) -> float:
        """The factor at `rows`: on the line between measured ones, flat beyond them."""
        if not self.read_rise:
            return 1.0
        at = bisect_right([knot for knot, _ in self.read_rise], rows)
        low, before = self.read_rise[max(at - 1, 0)]
        if at in {0, len(self.read_rise)}:
            return before
        high, after = self.read_rise[at]
        return before + (after - before) * (rows - low) / (high - low)


# One H200 (141 GB): reading 4 GB, cuBLAS in bfloat16 at 8,192 cubed and over all weight matrices of an
# 8 B model (docs/bench-steps.md).
H200 = Hardware(
    name="NVIDIA H200",
    read_bandwidth=4.24e12,
    matmul_rate=790e12,
    read_rise=((1, 1.0), (8, 1.015), (16, 1.024), (32, 1.046), (64, 1.063), (128, 1.141)),
)
PRESETS: Mapping[str, Hardware] = {"h200": H200}


def preset(device: torch.device) -> Hardware | None:
    """The ceilings kept for this kind of device, if there are any."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((known for known in PRESETS.values() if known.name == name), None)


def measure(device: torch.device, dtype: torch.dtype, *, scale: float = 1.0) -> Hardware:
    """Measure the ceilings of a device; seconds on a GPU and on two cores.

    Args:
        device: idle, with a tenth of its memory free.
        dtype: of the products.
        scale: of the sizes; 1 exceeds every cache. For tests.

    Returns:
        Medians of several runs; bandwidth is the better of two ways to read.
    """
    gpu = device.type == "cuda"
    count = max(1024, int((1 << 30 if gpu else 1 << 27) * scale))
    data = torch.ones(count, dtype=torch.float32, device=device)
    reading = min(_seconds(call, device) for call in (data.sum, data.amax))
    size = max(16, int((8192 if gpu else 1024) * scale))
    one = torch.ones(size, size, dtype=dtype, device=device)
    product = _seconds(lambda: one @ one, device)
    return Hardware(
        name=torch.cuda.get_device_name(device) if gpu else "CPU",
        read_bandwidth=data.nbytes / reading,
        matmul_rate=2.0 * size**3 / product,
        launch=_launch(device),
        read_rise=_measure_rise(data, dtype) if gpu else (),
    )


def _measure_rise(data: Tensor, dtype: torch.dtype) -> tuple[tuple[int, float], ...]:
    """Products with one matrix larger than the caches, over the fewest rows'; never falling."""
    inner = 1 << 12
    while inner * inner > data.numel():
        inner >>= 1
    weight = data[: data.numel() // inner * inner].view(-1, inner).to(dtype)
    found: list[tuple[int, float]] = []
    first = highest = 0.0
    for rows in _RISE_ROWS:
        x = torch.ones(rows, inner, dtype=dtype, device=data.device)
        took = _seconds(lambda x=x: torch.nn.functional.linear(x, weight), data.device)  # type: ignore[misc]
        first = first or took
        highest = max(highest, took / first)
        found.append((rows, highest))
    return tuple(found)


def _launch(device: torch.device) -> float:
    """Seconds of a call that does next to nothing: on a GPU within a graph."""
    x = torch.zeros(1, device=device)

    def calls() -> None:
        for _ in range(_TINY_CALLS):
            x.add_(1.0)

    if device.type != "cuda":
        return _seconds(calls, device) / _TINY_CALLS
    calls()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return _seconds(graph.replay, device) / _TINY_CALLS


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median time of a call; on a GPU on the device's clock."""
    call()
    if device.type != "cuda":
        times = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return statistics.median(times)
    events = []
    for _ in range(_REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize(device)
    return statistics.median(float(a.elapsed_time(b)) for a, b in events) / 1e3
