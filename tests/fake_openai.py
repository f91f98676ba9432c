"""An OpenAI-compatible server in a thread, on a real socket, that answers as a test says.

A reply is a list: bytes are written as a packet of their own, numbers are seconds of silence, and
`CLOSE` cuts the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

CLOSE = "close"
Reply = Sequence[Any]


@dataclass(frozen=True)
class Asked:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


def head(kind: str = "text/event-stream", status: str = "200 OK", *more: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", *more, "", ""]
    return "\r\n".join(lines).encode()


def whole(body: object, status: str = "200 OK", kind: str = "application/json") -> list[Any]:
    """A response that is no stream."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return [head(kind, status, f"Content-Length: {len(data)}") + data]


def chunked(*pieces: Any) -> list[Any]:
    """A chunked response whose body is these pieces, each a chunk and a packet; numbers wait."""
    made: list[Any] = [
        head("text/event-stream; charset=utf-8", "200 OK", "Transfer-Encoding: chunked")
    ]
    for piece in pieces:
        sized = isinstance(piece, bytes)
        made.append(b"%x\r\n%s\r\n" % (len(piece), piece) if sized else piece)
    return [*made, b"0\r\n\r\n"]


def event(chunk: object) -> bytes:
    text = chunk if isinstance(chunk, str) else json.dumps(chunk, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def delta(finish: str | None = None, **fields: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def usage(output: int, prompt: int = 5, **more: object) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, **more}
    return {"choices": [], "usage": counts}


def answer(*texts: str, tokens: int = 6, **more: object) -> list[Any]:
    """A usual streamed chat answer; `more` stands beside `usage` in the last chunk."""
    pieces: list[Any] = [event(delta(role="assistant", content=""))]
    pieces += [event(delta(content=text)) for text in texts]
    pieces += [event(delta("stop")), event(usage(tokens) | more), event("[DONE]")]
    return chunked(*pieces)


@dataclass
class FakeServer:
    """Answers POSTs by `reply`, GETs by `pages`; `asked` has all POSTs in their order."""

    reply: Callable[[Asked], Reply] = lambda _: answer("Hello", " world")
    pages: dict[str, Callable[[], Reply]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    gone: threading.Event = field(default_factory=threading.Event)  # a client left in mid-answer

    def __post_init__(self) -> None:
        self.pages.setdefault("/v1/models", lambda: whole({"data": [{"id": "fake"}]}))
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,))
        self._thread.start()
        assert started.wait(60)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, started: threading.Event) -> None:
        self._loop.run_until_complete(self._run(started))
        self._loop.close()

    async def _run(self, started: threading.Event) -> None:
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # lets transports end

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, ValueError):
            self.gone.set()
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        line = await reader.readline()
        if not line:
            return False
        method, path, _ = line.decode().split(" ", 2)
        headers = {}
        while (line := await reader.readline()) not in {b"\r\n", b""}:
            name, _, value = line.decode().partition(":")
            headers[name.strip().lower()] = value.strip()
        data = await reader.readexactly(int(headers.get("content-length", "0")))
        if method == "GET":
            missing = whole({"error": {"message": "no such page"}}, "404 Not Found")
            reply = self.pages.get(path, lambda: missing)()
        else:
            asked = Asked(method, path, headers, json.loads(data))
            self.asked.append(asked)
            reply = self.reply(asked)
        return await self._write(reply, reader, writer)

    async def _write(
        self, reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        for piece in reply:
            if piece == CLOSE:
                return False
            if isinstance(piece, bytes):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)  # a packet of its own, mostly
                continue
            with contextlib.suppress(TimeoutError):
                if await asyncio.wait_for(reader.read(1), piece) == b"":
                    self.gone.set()
                    return False
        return True
