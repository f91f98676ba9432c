"""One HTTP connection: uvicorn's, with limits on headers and on the time that they may take to come."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from paceline.api.server.encoding import encoded
from paceline.api.server.errors import ApiError
from paceline.api.server.settings import ServerSettings
from paceline.api.server.sse import ABORT, WRITE

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

    from paceline.api.server.sse import Write

_CLOSING = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
_MOST_AHEAD = 64  # requests that wait for the answer to an earlier one of their connection
_H2C = re.compile(rb"\r\nupgrade:(?=[ \t]*h2c[ \t]*(\r\n|$))", re.IGNORECASE)
_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


class Connection(HttpToolsProtocol):
    """A connection with limits; `limited` makes the class for some settings."""

    max_header_bytes: ClassVar[int]
    max_headers: ClassVar[int]
    max_connections: ClassVar[int | None]
    seconds: ClassVar[float]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = self._in_body = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._answering: RequestResponseCycle | None = None  # `cycle` is the last that came

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come; one that says nothing goes like one that has nothing more to say."""
        super().connection_made(transport)
        if self.max_connections is not None and len(self.connections) > self.max_connections:
            msg = f"{self.max_connections} connections are possible and open; come back later"
            self._refusal = ApiError(503, msg)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._forget_timer()
        self._unset_keepalive_if_required()
        if self._answering is not None and not self._answering.response_complete:
            # The parent tells only the last request, which may wait for this one.
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; a head that is too long or too slow ends the connection."""
        if self.transport.is_closing():
            return
        self._head_bytes += len(data)
        idle = self.timeout_keep_alive_task
        super().data_received(data if self._in_body else _without_h2c(data))
        self._stay_idle(idle)
        if not self._in_head:
            self._head_bytes = 0
        elif self._head_bytes > self.max_header_bytes:
            self._refuse(self._too_long())
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.seconds, self._too_slow)

    def _stay_idle(self, timer: asyncio.TimerHandle | None) -> None:
        """Data that begins no request, or belongs to one that was answered, leaves the timer running."""
        is_idle = not self._in_head and (self.cycle is None or self.cycle.response_complete)
        if not is_idle or self.timeout_keep_alive_task is not None or self.transport.is_closing():
            return
        now = self.loop.time()
        end = now + self.timeout_keep_alive if timer is None else timer.when()
        self.timeout_keep_alive_task = self.loop.call_later(
            max(0.0, end - now), self.timeout_keep_alive_handler
        )

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its headers are there."""
        self._in_head, self._in_body = False, True
        self._forget_timer()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if len(self.headers) > self.max_headers or size > self.max_header_bytes:
            self._refusal = self._too_long()
        if len(self.pipeline) >= _MOST_AHEAD:
            msg = f"{_MOST_AHEAD} requests may wait for an answer; send the next one after it"
            self._refusal = ApiError(400, msg)
        if self._refusal is not None:
            raise httptools.HttpParserError  # ends parsing; `send_400_response` answers
        extensions: dict[str, Any] = {ABORT: self.transport.abort, WRITE: self._writer}
        self.scope["extensions"] = extensions
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _unchunked(self.cycle)
        if not self.pipeline:
            self._answering = self.cycle

    def on_message_complete(self) -> None:
        """Its body is there."""
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The next request's turn."""
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()

    def _writer(self) -> Write:
        """Sends parts of the body of the answer that is being made; only its app runs, no other one's."""
        cycle = self._answering
        assert cycle is not None, "an app runs for it"

        def write(body: bytes) -> Awaitable[None] | None:
            if cycle.disconnected or cycle.response_complete or not body:
                return None  # nobody reads it; and an empty chunk would end the body
            chunked = cycle.chunked_encoding
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if chunked else body)
            return self.flow.drain() if self.flow.write_paused else None

        return write

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing is logged: whoever offers another protocol is answered in this one."""

    def timeout_keep_alive_handler(self) -> None:
        """Nothing more was asked for; whoever has not even taken the last answer will not."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed, and close."""
        self._refuse(self._refusal or ApiError(400, f"{msg} Send HTTP/1.1."))

    def _refuse(self, error: ApiError) -> None:
        self._forget_timer()
        if self._may_answer():
            body = encoded(error.body)
            status = b"HTTP/1.1 %d %s\r\n" % (error.status, _REASONS[error.status])
            if error.status == 503:
                status += b"retry-after: 1\r\n"
            self.transport.write(status + _CLOSING % len(body) + body)
        self.transport.close()

    def _may_answer(self) -> bool:
        """Whether what is said now is taken for the answer to what was read last."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return True
        return self._in_body and cycle is self._answering and not cycle.response_started

    def _too_long(self) -> ApiError:
        msg = (
            f"the headers are more than {self.max_headers}, or longer than {self.max_header_bytes} "
            "bytes together; send fewer"
        )
        return ApiError(431, msg)

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            msg = f"the headers did not come within {self.seconds:g} s; send them again, faster"
            self._refuse(ApiError(408, msg))

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _unchunked(cycle: RequestResponseCycle) -> None:
    """Let an answer whose length is not known go out as it is: HTTP/1.0 knows no chunks.

    The end of the connection is the end of the body, and uvicorn closes it after HTTP/1.0 anyway.
    """
    send = cycle.send

    async def unchunked(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":  # as much as was announced, so to speak
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.chunked_encoding = False
    cycle.send = unchunked  # type: ignore[method-assign]


def _without_h2c(data: bytes) -> bytes:
    """A head without the offer of HTTP/2: Java's client makes it, and the parser would drop the body."""
    if b"h2c" not in data:
        return data
    head, end, rest = data.partition(b"\r\n\r\n")
    return _H2C.sub(b"\r\nignored:", head) + end + rest


def limited(settings: ServerSettings) -> type[Connection]:
    """The class of a server's connections."""

    class Limited(Connection):
        max_header_bytes = settings.max_header_bytes
        max_headers = settings.max_headers
        max_connections = settings.max_connections
        seconds = settings.body_timeout

    return Limited
