"""A real server: `paceline serve` in a process of its own, on a free port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_S = 90.0  # importing PyTorch takes seconds, on a busy machine many
END_S = 30.0


@dataclass(frozen=True)
class ServerProcess:
    """A server that takes requests."""

    url: str  # without a slash at its end
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def stop(self) -> int:
        """Ask it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_S)


@contextmanager
def running(model: Path, folder: Path, *flags: str) -> Iterator[ServerProcess]:
    """Serve a model until the context ends.

    Args:
        model: its folder.
        folder: an empty one, for the log and the port.
        flags: of `paceline serve`.
    """
    port, log = folder / "port", folder / "log"
    command = [sys.executable, "-m", "paceline", "serve", str(model), "--threads", "1"]
    command += ["--port", "0", "--port-file", str(port), *flags]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_SERVE")}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        deadline = time.monotonic() + START_S
        while not (port.exists() and port.read_text().strip()):
            if process.poll() is not None or time.monotonic() > deadline:
                msg = f"the server did not start:\n{log.read_text()}"
                raise AssertionError(msg)
            time.sleep(0.05)
        yield ServerProcess(f"http://127.0.0.1:{port.read_text().strip()}", process, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
