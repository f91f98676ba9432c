"""HTTP/1.1 over asyncio, for measuring: one call per request, bytes handed on with their time of arrival.

A general client puts queues and wrappers between the socket and the reader, whose time would be
measured too. Not for: redirects, proxies, compression, cookies.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from paceline.bench.serve_connection import (
    NO_CONNECTION,
    TIMEOUT,
    Connection,
    ExchangeError,
    Sink,
    parsers,
)
from paceline.core.errors import ConfigError

# What a server may send beyond one body that is read whole (errors, model lists, metrics).
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server is: `http://host:port`, perhaps with a path before `/v1`."""

    host: str
    port: int
    tls: bool
    path: str  # "" or "/path": before "/v1" and "/metrics"

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read a base URL, with or without a closing `/v1`.

        Raises:
            ConfigError: it is none.
        """
        form = "a server is named as http://HOST:PORT, for example http://localhost:8000"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            msg = f"cannot read the URL {url!r}: {error}; {form}"
            raise ConfigError(msg) from error
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            msg = f"cannot read the URL {url!r}: no http:// or https:// with a host; {form}"
            raise ConfigError(msg)
        if parts.query or parts.fragment or parts.username is not None:
            msg = f"the URL may have no user, query or fragment; {form}; a key goes to --api-key"
            raise ConfigError(msg)
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(
            host=parts.hostname,
            port=(443 if tls else 80) if port is None else port,
            tls=tls,
            path=path,
        )

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"


class Body:
    """A response read whole, for what is not measured."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self._data = bytearray()

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """See `Sink`."""
        self.status, self.headers = status, headers

    def feed(self, at: float, data: bytes) -> None:  # noqa: ARG002 (see `Sink`)
        """See `Sink`."""
        if len(self._data) < _MOST_BYTES:
            self._data += data

    @property
    def text(self) -> str:
        """The body as text; what is no UTF-8 becomes a sign for that."""
        return self._data.decode("utf-8", errors="replace")


class HttpClient:
    """Sends requests to one server and keeps its connections open between them.

    Args:
        address: the server.
        api_key: sent as a bearer token.
        timeout: seconds for a request, connecting included; None: as long as it takes.
    """

    def __init__(
        self, address: Address, *, api_key: str | None = None, timeout: float | None
    ) -> None:
        parsers()  # refused before anything is sent
        self._address = address
        self._timeout = timeout
        self._idle: list[Connection] = []
        host = f"[{address.host}]" if ":" in address.host else address.host
        headers = [
            f"Host: {host}:{address.port}",
            "User-Agent: paceline",
            "Accept: */*",
            "Accept-Encoding: identity",
            *([f"Authorization: Bearer {api_key}"] if api_key else []),
        ]
        try:
            self._headers = "\r\n".join(headers).encode("ascii")
        except UnicodeEncodeError as error:
            msg = "the host or the API key holds a character that HTTP headers cannot carry; write a host in its xn-- form"
            raise ConfigError(msg) from error
        if "\n" in (api_key or "") or "\r" in (api_key or ""):
            msg = "the API key holds a line end; a key is one line: check how it was read"
            raise ConfigError(msg)

    async def get(self, path: str) -> Body:
        """Fetch `path`, whatever the status.

        Raises:
            ExchangeError: no whole response came.
        """
        body = Body()
        await self.send("GET", path, None, body)
        return body

    async def send(self, method: str, path: str, body: bytes | None, sink: Sink) -> None:
        """Send a request and hand its response to `sink` until it is complete.

        A connection that was kept open may have been closed by the server at the very moment that
        it is used again. If so, and nothing of a response has come, the request is sent once more
        over a new one.

        Args:
            method: GET or POST.
            path: after the server's own, for example "/v1/models".
            body: JSON, encoded.
            sink: gets the response.

        Raises:
            ExchangeError: no whole response came.
        """
        head = f"{method} {self._address.path}{path} HTTP/1.1\r\n".encode("ascii") + self._headers
        if body is not None:
            head += b"\r\nContent-Type: application/json\r\nContent-Length: %d" % len(body)
        message = head + b"\r\n\r\n" + (body or b"")
        try:
            async with asyncio.timeout(self._timeout):
                kept = self._kept()
                if kept is not None and await self._exchange(kept, message, sink, again=True):
                    return
                await self._exchange(await self._connect(), message, sink)
        except TimeoutError as error:
            limit = "in time" if self._timeout is None else f"within {self._timeout:g} s"
            msg = f"no whole answer {limit}"
            raise ExchangeError(TIMEOUT, msg) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections that are kept open."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # lets their transports end

    def _kept(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        context = ssl.create_default_context() if self._address.tls else None
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, self._address.host, self._address.port, ssl=context
            )
        except TimeoutError:
            raise
        except (OSError, UnicodeError) as error:
            msg = f"cannot connect to {self._address}: {str(error) or type(error).__name__}"
            raise ExchangeError(NO_CONNECTION, msg) from error
        return connection

    async def _exchange(
        self, connection: Connection, message: bytes, sink: Sink, *, again: bool = False
    ) -> bool:
        """Exchange messages; False, where `again` allows it, if nothing came back at all."""
        done = False
        try:
            await connection.exchange(message, sink)
            done = True
        except ExchangeError:
            if not again or connection.answered:
                raise
        finally:
            if done and connection.usable:
                self._idle.append(connection)
            else:  # also when cancelled: a server stops working for a reader who has gone
                connection.close()
        return done
