"""Clients for `serve_cpu.py`, in a process of their own: they read bytes, note when, and understand nothing.

A line of JSON on standard input is an order, a line on standard output its outcome. Clients share the two
cores with the server, so whatever they computed would count as the server's cost.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import uvloop

HOST = "127.0.0.1"
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')  # in the last event but [DONE]
_TAIL = 2048  # bytes, more than that event has
_OK = b"HTTP/1.1 200"


class Reader(asyncio.Protocol):
    """One request and its answer, to the end of the stream."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.sent = self.first = self.last = 0.0
        self.num_bytes = self.num_reads = self.num_tokens = 0
        self.status = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send the request."""
        self.transport = transport
        self.sent = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Note it; the first event counts, not the head before it."""
        now = time.perf_counter()
        if not self.status:
            self.status = int(data[9:12])
        if not self.first and b"data: " in data:
            self.first = now
        self.last = now
        self.num_bytes += len(data)
        self.num_reads += 1
        tail = self._tail + data
        if b"[DONE]" in tail or self.status != 200:
            if found := _USAGE.search(tail):
                self.num_tokens = int(found[1])
            self._end()
        self._tail = tail[-_TAIL:]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The server has closed."""
        self._end()

    def _end(self) -> None:
        self.transport.close()
        if not self.ended.done():
            self.ended.set_result(None)

    def outcome(self) -> dict[str, float]:
        """What was noted; seconds after the request was sent."""
        return {
            "status": self.status,
            "first_s": self.first - self.sent,
            "sent": self.sent,
            "end": self.last,
            "num_tokens": self.num_tokens,
            "num_bytes": self.num_bytes,
            "num_reads": self.num_reads,
        }


class Held(asyncio.Protocol):
    """Asks once and stays connected."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.answered = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Ask."""
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:  # noqa: ARG002
        """Something was answered."""
        if not self.answered.done():
            self.answered.set_result(None)


def post(body: Mapping[str, Any]) -> bytes:
    """A request for an answer as it goes over the wire."""
    text = json.dumps(body).encode()
    path = "chat/completions" if "messages" in body else "completions"
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(text)}\r\n\r\n".encode() + text


async def connected(port: int, make: Callable[[], Any]) -> Any:
    """A connection's protocol."""
    _, protocol = await asyncio.get_running_loop().create_connection(make, HOST, port)
    return protocol


async def streams(port: int, bodies: Sequence[Mapping[str, Any]]) -> list[Reader]:
    """Send requests at once, each over a connection of its own."""
    return [await connected(port, lambda b=body: Reader(post(b))) for body in bodies]


async def load(order: Mapping[str, Any]) -> dict[str, Any]:
    """Streams at once; while all of them run, a probe is sent now and then."""
    readers = await streams(order["port"], order["bodies"])
    probes = []
    if "probe" in order:
        await asyncio.sleep(order["probe_after_s"])
        while not any(r.ended.done() for r in readers):
            (probe,) = await streams(order["port"], [order["probe"]])
            await probe.ended
            if not any(r.ended.done() for r in readers):
                probes.append(probe.outcome())
            await asyncio.sleep(order["probe_every_s"])
    await asyncio.gather(*(r.ended for r in readers))
    return {"streams": [r.outcome() for r in readers], "probes": probes}


async def hold(order: Mapping[str, Any], held: list[Any]) -> dict[str, Any]:
    """Connections that stay: idle ones, and some that wait for an answer."""
    idle = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    asked = [idle] * order["idle"] + [post(body) for body in order["bodies"]]
    for request in asked:
        held.append(await connected(order["port"], lambda r=request: Held(r)))
        await held[-1].answered
    return {"held": len(held)}


async def sip(order: Mapping[str, Any], answered: asyncio.Future[None]) -> None:
    """Ask for a stream; once it is answered, read a byte of it a second."""
    events = asyncio.get_running_loop()
    with socket.socket() as slow:
        slow.setblocking(False)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await events.sock_connect(slow, (HOST, order["port"]))
        await events.sock_sendall(slow, post(order["bodies"][0]))
        status = b""
        while len(status) < len(_OK) and (more := await events.sock_recv(slow, 1)):
            status += more
        assert status == _OK, status
        answered.set_result(None)
        while await events.sock_recv(slow, 1):  # noqa: ASYNC110 (it waits for bytes)
            await asyncio.sleep(1.0)
        msg = "the server has closed a stream that was read slowly"
        raise ConnectionError(msg)


async def obey() -> None:
    """Carry out orders until the input ends."""
    events = asyncio.get_running_loop()
    held: list[Any] = []
    sipping: list[asyncio.Task[None]] = []
    while line := await events.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        start = time.process_time()
        outcome: dict[str, Any] = {}
        match order["what"]:
            case "load":
                outcome = await load(order)
            case "hold":
                outcome = await hold(order, held)
            case "sip":
                answered = events.create_future()
                sipping.append(asyncio.create_task(sip(order, answered)))
                await asyncio.wait((answered, sipping[-1]), return_when="FIRST_COMPLETED")
            case "release":
                for protocol in held:
                    protocol.transport.close()
                for task in sipping:
                    if not task.cancel():
                        task.result()  # it has ended before its time: say why
                held.clear()
                sipping.clear()
        outcome["client_cpu_s"] = time.process_time() - start
        sys.stdout.write(json.dumps(outcome) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(obey())
