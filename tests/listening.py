"""An app on a real socket in this process, for clients that need one; no tests here."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from paceline.api.llm import LLM
from paceline.api.server.app import create_app
from paceline.api.server.metrics import Metrics
from paceline.api.server.service import Service
from paceline.api.server.settings import ServerSettings

_START_S = 20.0


@contextmanager
def listening(make_llm: Callable[[], LLM], **settings: object) -> Iterator[str]:
    """Serve an LLM until the context ends; the address, without a slash at its end.

    Args:
        make_llm: the LLM, closed at the end.
        settings: of the server.
    """
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    bound.listen()
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    found = ServerSettings(served_model_name=("tiny",), drain_timeout=0.5, **settings)  # type: ignore[arg-type]
    llm = make_llm()
    ready: list[uvicorn.Server] = []

    async def serve() -> None:
        metrics = Metrics("tiny")
        app = create_app(Service(llm, found, listener=metrics), metrics=metrics)
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        ready.append(server)
        await server.serve([bound])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + _START_S
        while not (ready and ready[0].started):
            assert thread.is_alive(), "the server did not start"
            assert time.monotonic() < deadline, "the server did not start in time"
            time.sleep(0.01)
        yield url
    finally:
        if ready:
            ready[0].should_exit = True
        thread.join(_START_S)
        bound.close()
        llm.close()
