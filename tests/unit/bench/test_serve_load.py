from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from paceline.bench.serve_client import Answer
from paceline.bench.serve_load import Load, Measured, put_load, send_times


class Server:
    """Answers after a while; knows how many were asked at once, and in which order."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds
        self.order: list[int] = []
        self.now = self.most = 0

    async def __call__(self, index: int) -> Answer:
        self.order.append(index)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.seconds)
        self.now -= 1
        return Answer(started=float(index))


def measure(server: Any, num: int, load: Load, **options: Any) -> Measured:
    return asyncio.run(put_load(server, num, load, **options))


@pytest.mark.parametrize("concurrency,most", [(1, 1), (3, 3), (50, 10)])
def test_a_closed_loop_keeps_so_many_going(concurrency: int, most: int) -> None:
    """Never more than asked for, and as many while there are requests; answers keep their order."""
    server, told = Server(), []
    got = measure(server, 10, Load(concurrency=concurrency), progress=lambda: told.append(1))
    assert (server.most, got.most_at_once, len(told)) == (most, most, 10)
    assert server.order == list(range(10))
    assert [a.started for a in got.answers] == list(range(10))
    assert got.seconds >= 10 / most * 0.01 * 0.9


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """A server that answers nobody before all have asked gets its load all the same."""

    class Stubborn(Server):
        async def __call__(self, index: int) -> Answer:
            self.order.append(index)
            while len(self.order) < 8:  # noqa: ASYNC110 (asked of several coroutines)
                await asyncio.sleep(0.001)
            return Answer(started=0.0)

    assert measure(Stubborn(), 8, Load(rate=200.0), seed=1).most_at_once == 8
    assert measure(Stubborn(), 8, Load(rate=float("inf"))).most_at_once == 8


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_shape(burstiness: float) -> None:
    """Gamma gaps: the mean is 1 / rate, the variation 1 / sqrt(burstiness); 1 is Poisson."""
    times = send_times(20_001, Load(rate=5.0, burstiness=burstiness), seed=3)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    assert times == send_times(20_001, Load(rate=5.0, burstiness=burstiness), seed=3)
    assert times != send_times(20_001, Load(rate=5.0, burstiness=burstiness), seed=4)


def test_one_request_has_one_time() -> None:
    """No gap to draw."""
    assert send_times(1, Load(rate=1.0), seed=0) == [0.0]
    assert send_times(3, Load(rate=float("inf")), seed=0) == [0.0] * 3


def test_a_client_that_is_too_slow_says_so() -> None:
    """Its own delays must not pass for the server's."""
    fine = Measured(
        answers=(),
        seconds=1.0,
        most_at_once=1,
        client_share=0.2,
        client_lag=(0.0, 0.001),
        sent_late=0.001,
    )
    assert fine.complaint() is None
    from dataclasses import replace

    for bad in ({"client_share": 0.9}, {"client_lag": (0.2, 0.3)}, {"sent_late": 0.2}):
        complaint = replace(fine, **bad).complaint()
        assert complaint is not None
        assert "its own delays" in complaint


def test_the_client_watches_itself() -> None:
    """Whoever blocks the loop is noticed."""
    import time

    async def send(index: int) -> Answer:
        await asyncio.sleep(0.02)
        time.sleep(0.1)  # noqa: ASYNC251 (that is the point)
        await asyncio.sleep(0.02)
        return Answer(started=0.0)

    got = measure(send, 2, Load(concurrency=1))
    assert max(got.client_lag) > 0.05
    assert 0 <= got.client_share < 1.5

    async def block(index: int) -> Answer:
        time.sleep(0.1)  # noqa: ASYNC251 (the same)
        return Answer(started=0.0)

    assert measure(block, 2, Load(rate=1000.0)).sent_late > 0.05
