"""Event streams over any ASGI server: all that goes out, and who is told when it fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from paceline.api.server.sse import WRITE, Event, EventStream
from paceline.core.errors import EngineStoppedError

HELLO = b'data: {"text":"hello"}\n\n'


async def two(fails: Exception | None = None) -> AsyncIterator[Event]:
    yield {"text": "hello"}
    yield "named", {"n": 1}
    if fails is not None:
        raise fails


def sent(
    stream: EventStream, extensions: dict[str, Any] | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """What an app sends, and how the parts of its body went: "asgi" or "direct"."""
    found: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        found.append(dict(message))

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def main() -> None:
        scope = {"type": "http"} | ({} if extensions is None else {"extensions": extensions})
        await stream(scope, receive, send)

    asyncio.run(main())
    return found, [m["type"] for m in found]


def test_without_an_extension_all_goes_the_usual_way() -> None:
    """As under a server that is not ours."""
    found, kinds = sent(EventStream(two()))
    assert kinds == ["http.response.start", *["http.response.body"] * 3]
    assert [m["body"] for m in found[1:]] == [
        HELLO,
        b'event: named\ndata: {"n":1}\n\n',
        b"data: [DONE]\n\n",
    ]
    assert [m["more_body"] for m in found[1:]] == [True, True, False]


def direct_to(parts: list[bytes], waits: Callable[[], Awaitable[None] | None]) -> dict[str, Any]:
    def write(body: bytes) -> Awaitable[None] | None:
        parts.append(body)
        return waits()

    return {WRITE: lambda: write}


def test_a_connection_may_take_events_directly() -> None:
    """Head and end go the usual way, so middleware and server know when an answer begins and ends."""
    parts: list[bytes] = []
    found, kinds = sent(EventStream(two()), direct_to(parts, lambda: None))
    assert parts == [HELLO, b'event: named\ndata: {"n":1}\n\n']
    assert kinds == ["http.response.start", "http.response.body"]
    assert found[-1] == {
        "type": "http.response.body",
        "body": b"data: [DONE]\n\n",
        "more_body": False,
    }


def test_no_event_is_made_before_a_connection_takes_more() -> None:
    """What it returns is waited for."""
    parts: list[bytes] = []
    events: list[str] = []

    async def taken() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        events.append("taken")

    async def source() -> AsyncIterator[Event]:
        for _ in range(3):
            events.append("made")
            yield {"text": "hello"}

    sent(EventStream(source()), direct_to(parts, taken))
    assert events == ["made", "taken"] * 3
    assert parts == [HELLO] * 3


def test_a_client_that_never_takes_more_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever waits for a connection longer than may be ends the answer; it closes its source."""
    closed: list[bool] = []

    async def source() -> AsyncIterator[Event]:
        try:
            yield {"text": "hello"}
        finally:
            closed.append(True)

    async def never() -> None:
        await asyncio.Event().wait()

    _, kinds = sent(EventStream(source(), write_timeout_s=0.1), direct_to([], never))
    assert kinds == ["http.response.start"]
    assert closed == [True]
    assert "did not take what its stream had sent" in caplog.text


def test_a_client_that_does_not_even_take_a_comment_is_given_up() -> None:
    """A comment that waits for the client does not keep the watch from counting the time."""
    parts: list[bytes] = []
    closed: list[bool] = []

    async def source() -> AsyncIterator[Event]:
        try:
            await asyncio.Event().wait()
            yield {}
        finally:
            closed.append(True)

    async def never() -> None:
        await asyncio.Event().wait()

    stream = EventStream(source(), keep_alive_s=0.05, write_timeout_s=0.2)
    _, kinds = sent(stream, direct_to(parts, never))
    assert parts == [b": keep-alive\n\n"]
    assert kinds == ["http.response.start"]
    assert closed == [True]


@pytest.mark.parametrize("error", [EngineStoppedError("no more"), ZeroDivisionError("own")])
def test_an_error_is_an_event(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Known ones are told in words and not logged; others are logged and not told."""
    parts: list[bytes] = []
    with caplog.at_level(logging.ERROR):
        found, _ = sent(EventStream(two(error)), direct_to(parts, lambda: None))
    told = found[1]["body"]
    known = isinstance(error, EngineStoppedError)
    assert (b"no more" in told) == known
    assert b"own" not in told
    assert bool(caplog.records) != known
    assert found[-1]["body"] == b"data: [DONE]\n\n"
