"""A server in a process of its own, on a free port: `paceline serve`, or another program that serves."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.local_server import wait_for

ROOT = Path(__file__).resolve().parents[1]
START_S = 180.0  # importing PyTorch takes seconds, on a busy machine many
LIMIT_S = 120.0  # nothing else takes a tenth of it


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

    def connected(self, timeout: float = LIMIT_S) -> socket.socket:
        """A plain connection."""
        found = socket.create_connection(("127.0.0.1", self.port), timeout)
        self.connections.append(found)
        return found

    def send_signal(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def refuses(self) -> bool:
        """Whether nobody listens any more."""
        try:
            socket.create_connection(("127.0.0.1", self.port), LIMIT_S).close()
        except OSError:
            return True
        return False

    def wait_to_say(self, text: str) -> None:
        """Wait until a text stands in the log."""
        wait_for(lambda: text in self.log.read_text(encoding="utf-8"), LIMIT_S)

    def ended(self) -> tuple[int, str]:
        """Exit code and log, once it has ended."""
        code = self.process.wait(LIMIT_S)
        return code, self.log.read_text(encoding="utf-8")

    def stop(self) -> int:
        """Ask it to end; its exit code."""
        self.send_signal()
        return self.process.wait(LIMIT_S)


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
    port = folder / "port"
    words = [module, "serve", str(model), "--threads", "1"]
    words += ["--port", "0", "--port-file", str(port), *flags]
    with serving(words, port, folder / "log", **environment) as found:
        yield found


@contextmanager
def serving(
    words: Sequence[str], port: Path, log: Path, **environment: str
) -> Iterator[ServerProcess]:
    """Run a program that serves, until the context ends.

    Args:
        words: its module and what that is told.
        port: the file into which it writes its port.
        log: gets all that it says.
        environment: further variables.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_SERVE")}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            stdout=out,
            stderr=out,
            env=inherited | environment,
            cwd=ROOT,
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
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
