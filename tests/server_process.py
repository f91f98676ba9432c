"""A real server: `paceline serve` in a process of its own, on a free port."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START_S = 180.0  # importing PyTorch takes seconds, on a busy machine many
END_S = 60.0


@dataclass(frozen=True)
class ServerProcess:
    """A server that takes requests."""

    url: str  # without a slash at its end
    process: subprocess.Popen[bytes]
    log: Path
    connections: list[socket.socket] = field(default_factory=list)  # closed at the end

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def connected(self, timeout: float = 60.0) -> socket.socket:
        """A plain connection."""
        found = socket.create_connection(("127.0.0.1", self.port), timeout)
        self.connections.append(found)
        return found

    def stop(self) -> int:
        """Ask it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_S)


@contextmanager
def many_files(number: int = 4096) -> Iterator[None]:
    """Let this process, and those that it starts, hold many connections at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def running(
    model: Path, folder: Path, *flags: str, module: str = "paceline", **environment: str
) -> Iterator[ServerProcess]:
    """Serve a model until the context ends.

    Args:
        model: its folder.
        folder: an empty one, for the log and the port.
        flags: of `paceline serve`.
        module: the program, which takes the same words.
        environment: further variables.
    """
    port, log = folder / "port", folder / "log"
    command = [sys.executable, "-m", module, "serve", str(model), "--threads", "1"]
    command += ["--port", "0", "--port-file", str(port), *flags]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_SERVE")}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=inherited | environment, cwd=ROOT
        )
    connections: list[socket.socket] = []
    try:
        deadline = time.monotonic() + START_S
        while not (port.exists() and port.read_text().strip()):
            if process.poll() is not None or time.monotonic() > deadline:
                msg = f"the server did not start:\n{log.read_text()}"
                raise AssertionError(msg)
            time.sleep(0.05)
        url = f"http://127.0.0.1:{port.read_text().strip()}"
        yield ServerProcess(url, process, log, connections)
    finally:
        for connection in connections:
            connection.close()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
