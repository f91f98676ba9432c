"""A server for `serve_cpu.py`: in this process, over an LLM that the engine's own figures come from too."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from paceline.api.llm import LLM
from paceline.api.server import life
from paceline.api.server.app import create_app
from paceline.api.server.metrics import Metrics
from paceline.api.server.service import Service
from paceline.api.server.settings import ServerSettings
from paceline.api.server.stage_clock import StageClock
from paceline.api.server.uvicorn_server import Server, config_of
from paceline.core.stages import silent

HERE = Path(__file__).parent


class Clients:
    """The process of `serve_clients.py`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "serve_clients.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, what: str, **order: Any) -> Any:
        """Give an order and wait for its outcome."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"what": what, **order}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the clients have died"
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()


class Switched:
    """Stages for an LLM that is used without a server and with one, which alone counts their times."""

    def __init__(self) -> None:
        self.clock = StageClock()
        self.on = False

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Implement `Stages`."""
        return self.clock(name) if self.on else silent(name)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """For the time of the context the server counts."""
        self.on = True
        try:
            yield
        finally:
            self.on = False


class Local:
    """The HTTP layer over an LLM, in a thread.

    Args:
        stages: the LLM's.

    Attributes:
        port: where it listens.
    """

    def __init__(self, llm: LLM, stages: Switched) -> None:
        self.port = 0
        self._stages = stages
        self._llm = llm
        self._up = threading.Event()
        self._server: Server | None = None
        self._events: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._up.wait()

    def cpu_seconds(self) -> float:
        """Processor time of the HTTP layer's thread so far."""
        assert self._events is not None

        async def now() -> float:
            return time.thread_time()

        return asyncio.run_coroutine_threadsafe(now(), self._events).result()

    def close(self) -> None:
        """End the server; the LLM stays."""
        assert self._server is not None
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        settings = ServerSettings(served_model_name=("default",))
        metrics = Metrics("default", num_positions=self._llm.spec.max_depth)
        self._stages.clock.tell = metrics.observe_stage
        app = create_app(Service(self._llm, settings, listener=metrics), metrics=metrics)
        listening = life.bound(replace(settings, port=0))
        self.port = listening.getsockname()[1]
        self._server = Server(config_of(app, settings, graceful_s=2), self._up.set)
        self._events = asyncio.get_running_loop()
        await self._server.serve([listening])


@contextmanager
def process(folder: Path, *flags: str) -> Iterator[tuple[int, int]]:
    """`paceline serve` in a process of its own; yields its id and its port."""
    port = folder / "port"
    port.unlink(missing_ok=True)
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", "--port-file", str(port)]
    with subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL) as server:
        try:
            while not port.exists():
                assert server.poll() is None, "the server did not start"
                time.sleep(0.1)
            yield server.pid, int(port.read_text())
        finally:
            server.terminate()


def server_load(port: int) -> int:
    """Requests that a server has open."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/load", timeout=60) as answer:
        return int(json.load(answer)["server_load"])
