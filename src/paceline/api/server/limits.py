"""Request bodies: how long, how deep, of which kind, and how slowly they may come.

The body is read here as a whole, so that everything behind gets it at once or never hears of it.
Not for: headers (connection.py), and what a body says (protocol.py).
"""

from __future__ import annotations

import asyncio
import re
from itertools import accumulate

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.api.server.errors import ApiError
from paceline.api.server.sse import JsonAnswer

_BODILESS = frozenset({"GET", "HEAD", "OPTIONS"})
# A refused body is still read, up to so many times the limit: a client that is cut off while it sends
# does not see the answer.
_READ_ON = 8
_LARGE = 256 * 2**10  # bytes beyond which looking through a body would be felt by others
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_NO_BRACKETS = bytes(b for b in range(256) if b not in b"[]{}")
_STEP = [0] * 256
for _bracket in b"[{":
    _STEP[_bracket] = 1
for _bracket in b"]}":
    _STEP[_bracket] = -1


class BodyLimits:
    """ASGI middleware: 413, 415, 408 or 400 for bodies that are not let in.

    Args:
        app: gets the whole body in one message.
        max_bytes: longest body.
        max_depth: deepest nesting of its JSON.
        seconds: longest time for it to come.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_depth: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_depth = max_depth
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through, or refuse."""
        if scope["type"] != "http" or scope["method"] in _BODILESS:
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
            if body is None:
                return
            await self._check(scope, body)
        except ApiError as error:
            headers = {**error.headers, **self._closing(scope, error)}
            await JsonAnswer(error.body, error.status, headers)(scope, receive, send)
            return
        told = False

        async def replay() -> Message:
            nonlocal told
            if told:
                return await receive()
            told = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None: the client has gone."""
        stated = _header(scope, b"content-length")
        if stated.isdigit() and int(stated) > self._max_bytes:
            raise self._too_long(int(stated))
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._seconds):
                more = True
                while more and size <= _READ_ON * self._max_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    size += len(message.get("body", b""))
                    if size > self._max_bytes:
                        parts.clear()
                    else:
                        parts.append(message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            msg = f"the body did not come within {self._seconds:g} s; send it again, faster"
            raise ApiError(408, msg) from None
        if size > self._max_bytes:
            raise self._too_long(size)
        return b"".join(parts)

    def _closing(self, scope: Scope, error: ApiError) -> dict[str, str]:
        """End the connection where too much of the body is still to come."""
        stated = _header(scope, b"content-length")
        endless = not stated.isdigit() or int(stated) > _READ_ON * self._max_bytes
        return {"Connection": "close"} if error.status in {408, 413} and endless else {}

    def _too_long(self, size: int) -> ApiError:
        msg = (
            f"the body has {size} bytes or more; {self._max_bytes} are possible; send less, or start "
            "the server with a larger --max-body-bytes"
        )
        return ApiError(413, msg, code="request_too_large")

    async def _check(self, scope: Scope, body: bytes) -> None:
        coding = _header(scope, b"content-encoding").strip().lower()
        if body and coding not in {b"", b"identity"}:
            msg = (
                f"the body's Content-Encoding is {coding[:100].decode('latin-1')!r}; plain bodies are "
                "possible; send it uncompressed, without that header"
            )
            raise ApiError(415, msg)
        kind = _header(scope, b"content-type").partition(b";")[0].strip().lower()
        if body and not _is_json(kind):
            msg = (
                f"the body's type is {kind[:100].decode('latin-1')!r}; JSON is possible; send the "
                "header 'Content-Type: application/json'"
            )
            raise ApiError(415, msg)
        if len(body) > _LARGE:
            depth = await asyncio.to_thread(json_depth, body)
        else:
            depth = json_depth(body)
        if depth > self._max_depth:
            msg = (
                f"the JSON is nested {depth} levels deep; {self._max_depth} are possible; send "
                "flatter JSON, or start the server with a larger --max-json-depth"
            )
            raise ApiError(400, msg, code="json_too_deep")


def json_depth(body: bytes) -> int:
    """Most objects and lists that are open at once, without reading the rest of the JSON."""
    if b"[" not in body and b"{" not in body:
        return 0
    brackets = _STRINGS.sub(b"", body).translate(None, _NO_BRACKETS)
    return max(accumulate(map(_STEP.__getitem__, brackets), initial=0))


def _is_json(kind: bytes) -> bool:
    return not kind or kind == b"application/json" or kind.endswith(b"+json")


def _header(scope: Scope, wanted: bytes) -> bytes:
    return next((value for name, value in scope["headers"] if name == wanted), b"")
