"""Answers on the wire: JSON bodies and server-sent events.

An `EventStream` sends what an async iterator gives, and beside it watches the client: comments keep an
idle connection open, and a client that has gone, or takes nothing for too long, ends the iterator.

Not for: what the events say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.api.server.disconnect import gone
from paceline.api.server.encoding import encoded
from paceline.api.server.errors import ApiError, api_error
from paceline.core.errors import PacelineError

log = logging.getLogger(__name__)

# Data; or the event's name and data. Text goes out as it is ("[DONE]").
Event: TypeAlias = Mapping[str, Any] | str | tuple[str, Mapping[str, Any]]
# ASGI extensions of our own connection (connection.py); without them all goes the usual way.
ABORT = "paceline.abort"  # ends the connection at once, whatever is still to be sent
# Gives a `Write` for parts of the body but the last, past middleware: several layers of coroutines for
# every event cost more than the event. Middleware has its say on the head.
WRITE = "paceline.write"
# Sends a part of the body; returns what to wait for before the next one, if anything.
Write: TypeAlias = Callable[[bytes], Awaitable[object] | None]

_COMMENT = b": keep-alive\n\n"


class JsonAnswer(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Encode."""
        return encoded(content)


class EventStream(Response):
    """A body of server-sent events.

    An error of the iterator becomes an event with an error's body, the last one but `end`.

    Args:
        events: what is sent; closed when the stream ends, however it ends.
        end: text of the last event; None: there is none.
        keep_alive_s: send a comment after so long without an event; 0: never.
        write_timeout_s: give up a client that has not taken what was sent for so long.
        error_event: name of the event that tells an error; None: it has none.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[Event],
        *,
        end: str | None = "[DONE]",
        keep_alive_s: float = 15.0,
        write_timeout_s: float = 300.0,
        error_event: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._end = end
        self._keep_alive_s = keep_alive_s
        self._write_timeout_s = write_timeout_s
        self._error_event = error_event
        self._sending_since: float | None = None
        self._last = time.monotonic()
        # No proxy may hold events back to make a larger answer of them.
        own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self.init_headers({**own, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the iterator ends or the client has gone."""
        direct = scope.get("extensions", {}).get(WRITE)
        write: Write = partial(_write, send) if direct is None else direct()
        work = asyncio.create_task(self._send_all(send, write))
        watch = asyncio.create_task(self._watch(receive, write))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, watch):
                task.cancel()
            results = await asyncio.gather(work, watch, return_exceptions=True)
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()
        if results[1] is _Slow:
            log.warning(
                "a client did not take what its stream had sent for %.0f s and was given up",
                self._write_timeout_s,
            )
            scope.get("extensions", {}).get(ABORT, lambda: None)()
            await asyncio.sleep(0)  # until the connection knows
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _send_all(self, send: Send, write: Write) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await self._until_taken(send({"type": "http.response.start", **head}))
        try:
            async for event in self._events:
                self._last = time.monotonic()
                taking = write(_framed(event))
                if taking is not None:
                    await self._until_taken(taking)
        except Exception as error:
            if not isinstance(error, PacelineError | ApiError):
                log.exception("a stream failed")
            told = api_error(error).body
            event = told if self._error_event is None else (self._error_event, told)
            await self._until_taken(_write(send, _framed(event)))
        last = b"" if self._end is None else _framed(self._end)
        await self._until_taken(_write(send, last, more=False))

    async def _until_taken(self, taking: Awaitable[object]) -> None:
        if self._sending_since is None:  # else a comment waits for the client already
            self._sending_since = time.monotonic()
        await taking
        self._last, self._sending_since = time.monotonic(), None

    async def _watch(self, receive: Receive, write: Write) -> type[_Slow] | None:
        """Return once the client has gone, or is too slow."""
        leaving = asyncio.create_task(gone(receive))
        comment: asyncio.Future[None] | None = None  # on its way, while the client is watched on
        tick = min(self._keep_alive_s or self._write_timeout_s, self._write_timeout_s) / 2
        try:
            while True:
                await asyncio.wait({leaving}, timeout=tick)
                if leaving.done():
                    return None
                now, sending = time.monotonic(), self._sending_since
                if sending is not None:
                    if now - sending > self._write_timeout_s:
                        return _Slow
                elif self._keep_alive_s and now - self._last >= self._keep_alive_s:
                    self._last = now
                    taking = write(_COMMENT)
                    if taking is not None:
                        self._sending_since = now
                        comment = asyncio.ensure_future(self._until_taken(taking))
        finally:
            waiting = [leaving] if comment is None else [leaving, comment]
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


class _Slow:
    """Why a watch ended: the client takes nothing."""


def _write(send: Send, body: bytes, *, more: bool = True) -> Awaitable[None]:
    """A `Write` over ASGI's `send`."""
    return send({"type": "http.response.body", "body": body, "more_body": more})


def _framed(event: Event) -> bytes:
    if isinstance(event, tuple):
        name, data = event
        return b"event: %s\ndata: %s\n\n" % (name.encode(), encoded(data))
    text = event.encode() if isinstance(event, str) else encoded(event)
    return b"data: %s\n\n" % text
