"""The whole HTTP interface on a real socket in this process, over a fake engine; no tests here."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx2

from paceline.api.llm import LLM
from paceline.api.server import life
from paceline.api.server.app import create_app
from paceline.api.server.metrics import Metrics
from paceline.api.server.service import Service
from paceline.api.server.settings import ServerSettings
from paceline.api.server.uvicorn_server import Server, config_of
from paceline.api.tokenizer import Tokenizer
from tests.fake_engine import TIMEOUT, FakeEngine, Gate
from tests.served import TOKENIZER, Script, ids

PATH = "/v1/completions"
ENDLESS = 100_000  # tokens that no test waits for


@dataclass
class LocalServer:
    """A server that takes requests."""

    port: int
    engine: FakeEngine
    llm: LLM
    service: Service
    metrics: Metrics
    events: asyncio.AbstractEventLoop
    gate: Gate  # closed: the engine's next step waits
    server: Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=TIMEOUT, **options)

    @property
    def num_connections(self) -> int:
        """Connections that the server has not given up."""
        return len(self.server.server_state.connections)

    def raw(self) -> socket.socket:
        """A plain connection."""
        return socket.create_connection(("127.0.0.1", self.port), TIMEOUT)

    def on_events(self, function: Callable[[], Any]) -> Any:
        """Call something on the event loop."""

        async def called() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self.events).result(TIMEOUT)

    def settle(self) -> None:
        """Wait until nothing is open any more, in the service and in the engine."""
        wait_for(lambda: self.service.admission.num_open == 0)
        wait_for(lambda: not self.engine._open)


def wait_for(condition: Callable[[], Any], seconds: float = TIMEOUT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def slowly(_: int) -> None:
    """A step that lets others have the machine."""
    time.sleep(0.002)


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "the end", "max_tokens": 4, **fields}


def post(fields: Mapping[str, Any], path: str = PATH, **headers: str) -> bytes:
    """A request as it goes over the wire."""
    text = json.dumps(fields).encode()
    given = {"host": "x", "content-type": "application/json", **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in given.items())
    return f"POST {path} HTTP/1.1\r\n{head}content-length: {len(text)}\r\n\r\n".encode() + text


def answer_on(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the answer on a plain connection."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):  # no byte of what comes after
        more = connection.recv(1)
        assert more, f"the connection ended within the head: {head!r}"
        head += more
    length = next(
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length")
    )
    rest = b""
    while len(rest) < length:
        rest += connection.recv(length - len(rest))
    return int(head[9:12]), json.loads(rest) if length else {}


def until(connection: socket.socket, mark: bytes) -> bytes:
    """What comes up to a mark, and perhaps more."""
    data, deadline = b"", time.monotonic() + TIMEOUT
    while mark not in data:
        more = connection.recv(65536)
        assert more, f"the connection ended after {data[-500:]!r}"
        assert time.monotonic() < deadline, "only something else comes"
        data += more
    return data


def rest(connection: socket.socket) -> bytes:
    """All that still comes, until the server closes the connection."""
    data, deadline = b"", time.monotonic() + TIMEOUT
    with connection:
        while more := connection.recv(65536):
            data += more
            assert time.monotonic() < deadline, "it does not end"
    return data


def begun(connection: socket.socket, **fields: Any) -> socket.socket:
    """Ask for a stream on a plain connection; it is under way when this returns."""
    connection.sendall(post(body(**{"max_tokens": ENDLESS, **fields}, stream=True)))
    assert until(connection, b"data: ").startswith(b"HTTP/1.1 200")
    return connection


@contextmanager
def local_server(
    script: Script | None = None,
    *,
    settings: ServerSettings | None = None,
    max_rows: int | None = None,
    tokenizer: Tokenizer = TOKENIZER,
    send_buffer: int | None = None,
    on_step: Callable[[int], object] = lambda _: None,
    **engine: Any,
) -> Iterator[LocalServer]:
    """Serve a fake engine.

    Args:
        script: see `FakeEngine`; default: an endless text.
        settings: of the server.
        max_rows: what the server takes the engine's rows to be.
        tokenizer: the model's.
        send_buffer: bytes that the system may hold of what a client does not take; default: megabytes.
        on_step: called at the beginning of each step, once the gate is open.
        engine: more of `FakeEngine`.
    """
    gate = Gate()

    def step(number: int) -> None:
        gate(number)
        on_step(number)

    fake = FakeEngine(ids("abcdefghij") if script is None else script, on_step=step, **engine)
    if max_rows is not None:
        fake.config = replace(fake.config, cache=replace(fake.config.cache, max_rows=max_rows))
    llm = LLM.from_engine(fake, tokenizer)
    metrics = Metrics("tiny", num_positions=2, vllm_names=True)
    own = settings or ServerSettings(served_model_name=("tiny",))
    listening = life.bound(replace(own, port=0, uds=None))
    if send_buffer is not None:  # connections inherit it
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    started: list[LocalServer] = []
    up = threading.Event()

    async def serve() -> None:
        service = Service(llm, own, listener=metrics)
        app = create_app(service, metrics=metrics)
        port, events = listening.getsockname()[1], asyncio.get_running_loop()
        server = Server(config_of(app, own, graceful_s=2), up.set)
        started.append(LocalServer(port, fake, llm, service, metrics, events, gate, server))
        await server.serve([listening])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        assert up.wait(TIMEOUT), "the server did not start"
        yield started[0]
    finally:
        gate.open()
        if started:
            started[0].server.should_exit = True
        thread.join(TIMEOUT)
        listening.close()
        llm.close()
        assert not thread.is_alive(), "the server did not end"
