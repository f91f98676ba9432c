"""One HTTP/1.1 connection: a packet's time is taken before anything looks at it.

Messages are parsed by httptools (llhttp), which is also what the server side uses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol

from paceline.core.errors import ConfigError, PacelineError

NO_CONNECTION = "no connection"
TIMEOUT = "timeout"
LOST = "connection lost"
PROTOCOL = "bad HTTP"


class ExchangeError(PacelineError):
    """A request that got no whole response; `kind` is one of a few words, for counting."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Sink(Protocol):
    """Takes a response as it arrives."""

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Take status and headers (names in lower case), once, before any of the body."""
        ...

    def feed(self, at: float, data: bytes) -> None:
        """Take a part of the body that arrived at `at` (seconds of `time.perf_counter`)."""
        ...


_GONE = "the server closed the connection before the answer was complete"


class Connection(asyncio.Protocol):
    """One connection; serves one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None  # httptools.HttpResponseParser
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self.answered = False
        self._headers: dict[str, str] = {}
        self._begun = False  # headers of the response itself have come
        self._ended = False
        self._pieces: list[bytes] = []
        self._keeps = True

    @property
    def usable(self) -> bool:
        """Whether another exchange may follow."""
        open_ = self._transport is not None and not self._transport.is_closing()
        return open_ and self._keeps and (self._done is None or self._done.done())

    async def exchange(self, message: bytes, sink: Sink) -> None:
        """Send a whole request; return when its response is complete.

        Raises:
            ExchangeError: the connection was lost, or what came is no HTTP.
        """
        if self._transport is None or self._transport.is_closing():
            raise ExchangeError(LOST, _GONE)
        self._parser = parsers().HttpResponseParser(self)
        self._sink, self._done = sink, asyncio.get_running_loop().create_future()
        self.answered = self._begun = self._ended = False
        self._headers = {}
        self._transport.write(message)
        await self._done

    def close(self) -> None:
        """Close the connection; at once, if an answer is still coming."""
        if self._transport is None:
            return
        if self._done is None or self._done.done():
            self._transport.close()
        else:
            self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Note the time, then parse, then hand on."""
        at = time.perf_counter()
        if self._sink is None or self._done is None or self._done.done():
            self._keeps = False  # nobody asked
            return
        self.answered = True
        failure: Exception | None = None
        try:
            self._parser.feed_data(data)
        except parsers().HttpParserError as error:
            self._keeps = False
            if not self._ended:  # else it sent more than its answer
                failure = ExchangeError(PROTOCOL, f"what the server sent is no HTTP/1.1: {error}")
        try:
            for piece in self._pieces:
                self._sink.feed(at, piece)
        except Exception as error:  # noqa: BLE001 (whoever waits for the exchange gets it)
            failure = error
        self._pieces.clear()
        if failure is not None:
            self._keeps = False
            self._end(failure)
        elif self._ended:
            self._end(None)

    def eof_received(self) -> bool | None:
        """Let the transport close itself."""
        self._keeps = False
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange: the answer lasted until now, or it is lost."""
        self._keeps = False
        if (
            self._begun
            and exc is None
            and not {"content-length", "transfer-encoding"} & {*self._headers}
        ):
            self._end(None)  # such a body lasts until the connection ends
        else:
            self._end(ExchangeError(LOST, f"{_GONE}: {exc}" if exc else _GONE))

    def _end(self, failure: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if failure is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(failure)

    # the parser's callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Tell the sink that the response begins."""
        if self._ended or self._sink is None:
            return
        status = self._parser.get_status_code()
        if status < 200:  # 100, 103: the response itself is still to come
            self._headers = {}
            return
        self._begun = True
        self._sink.begin(status, self._headers)

    def on_message_begin(self) -> None:
        """Notice a second answer that nobody asked for."""
        if self._ended:
            self._keeps = False

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body until the packet is parsed."""
        if not self._ended:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        """Note that the response is whole."""
        if self._begun and not self._ended:
            self._ended = True
            self._keeps = self._keeps and self._parser.should_keep_alive()


def parsers() -> ModuleType:
    """httptools, which comes with the extra `server`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import httptools
    except ImportError as error:
        msg = (
            "talking to a server needs httptools, which is not installed; to get it: "
            "pip install 'paceline[server]'"
        )
        raise ConfigError(msg) from error
    return httptools
