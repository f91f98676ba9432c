"""Load on a server: so many requests at a time (closed loop), or so many a second (open loop).

A closed loop sends the next request when an answer ends, so a slow server gets less load. An open
loop sends at times drawn beforehand, whatever the server does, as users do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.bench.serve_client import Answer

_PROBE_S = 0.01
_BUSY_SHARE = 0.7  # of one core
_LATE_S = 0.05

Send = Callable[[int], Awaitable[Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests come. Exactly one of the two is set.

    `burstiness` is the shape of the gamma distribution that gaps between requests are drawn from:
    1 is a Poisson process, less comes in bursts, more is more even (vLLM's definition).
    """

    concurrency: int | None = None
    rate: float | None = None  # requests a second; inf: all at once
    burstiness: float = 1.0

    def __str__(self) -> str:
        return f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g} a second"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run under one load."""

    answers: Sequence[Answer]  # in the order of the requests
    seconds: float  # from the first request to the end of the last
    most_at_once: int
    client_share: float  # processor time of this process over wall time
    client_lag: Sequence[float]  # seconds by which this process noticed things late, sampled
    sent_late: float  # open loop: the largest delay of a request after its time, seconds

    def complaint(self) -> str | None:
        """Why this client rather than the server may have been measured; None: it was idle enough."""
        lag = float(np.percentile(self.client_lag, 99)) if self.client_lag else 0.0
        if self.client_share <= _BUSY_SHARE and lag <= _LATE_S and self.sent_late <= _LATE_S:
            return None
        return (
            f"this client was busy {self.client_share:.0%} of the time and up to {1e3 * lag:.0f} ms late "
            f"(p99; requests were sent up to {1e3 * self.sent_late:.0f} ms late): times hold its own "
            "delays; give it a core of its own, or less load"
        )


def send_times(num: int, load: Load, seed: int) -> list[float]:
    """Seconds after the start at which an open loop sends its requests; the first one is 0."""
    assert load.rate is not None, "a closed loop has no times"
    if load.rate == float("inf"):
        return [0.0] * num
    drawn = np.random.default_rng(seed)
    scale = 1 / (load.rate * load.burstiness)
    gaps = drawn.gamma(shape=load.burstiness, scale=scale, size=max(0, num - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:num]


async def put_load(
    send: Send,
    num: int,
    load: Load,
    *,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> Measured:
    """Send requests 0 ... num - 1 under a load and wait for all answers.

    Args:
        send: sends one; returns its answer, failures included.
        num: how many.
        load: how they come.
        seed: of an open loop's times.
        progress: told after each answer.
    """
    answers: dict[int, Answer] = {}
    at_once = most = 0
    late = 0.0

    async def one(index: int) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        answers[index] = await send(index)
        at_once -= 1
        progress()

    async def stream(indices: list[int]) -> None:
        while indices:
            await one(indices.pop())

    async def timed(index: int, due: float) -> None:
        nonlocal late
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        late = max(late, time.perf_counter() - due)
        await one(index)

    lag: list[float] = []
    probe = asyncio.create_task(_probe(lag))
    cpu, start = time.process_time(), time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            if load.rate is None:
                waiting = list(range(num))[::-1]
                for _ in range(min(load.concurrency or 1, num)):
                    group.create_task(stream(waiting))
            else:
                for index, after in enumerate(send_times(num, load, seed)):
                    group.create_task(timed(index, start + after))
    finally:
        probe.cancel()
    seconds = time.perf_counter() - start
    return Measured(
        answers=[answers[i] for i in range(num)],
        seconds=seconds,
        most_at_once=most,
        client_share=(time.process_time() - cpu) / seconds,
        client_lag=lag,
        sent_late=late,
    )


async def _probe(lag: list[float]) -> None:
    """Note how late a sleeper wakes: that is how late every packet's time may be."""
    while True:
        due = time.perf_counter() + _PROBE_S
        await asyncio.sleep(_PROBE_S)
        lag.append(max(0.0, time.perf_counter() - due))
