"""The server's process: signals, exit codes, sockets. Its engine is a fake one, whose answers have no end."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from paceline.api.server import life
from paceline.api.server.settings import ServerSettings
from paceline.core.errors import ConfigError
from tests.local_server import ENDLESS, PATH, answer_on, body, post, wait_for

ROOT = Path(__file__).resolve().parents[3]
START_S = 90.0
END_S = 50.0


@dataclass
class Process:
    port: int
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def begun(self) -> socket.socket:
        """A stream under way."""
        connection = socket.create_connection(("127.0.0.1", self.port), END_S)
        connection.sendall(post(body(max_tokens=ENDLESS, stream=True)))
        while b"data: " not in (data := connection.recv(65536)):
            assert data, "it ended"
        return connection

    def ended(self) -> tuple[int, str]:
        """Exit code, and what was written."""
        out, _ = self.process.communicate(timeout=END_S)
        return self.process.returncode, out


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    made: list[subprocess.Popen[str]] = []

    def begin(**settings: object) -> Process:
        port = tmp_path / f"port{len(made)}"
        words = [f"{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "tests.fake_server", str(port), *words]
        made.append(
            subprocess.Popen(
                command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
        wait_for(lambda: port.exists() or made[-1].poll() is not None, START_S)
        assert port.exists(), made[-1].communicate()[0]
        wait_for(lambda: port.read_text().strip())
        return Process(int(port.read_text()), made[-1])

    yield begin
    for process in made:
        if process.poll() is None:
            process.kill()
        if not process.stdout.closed:
            process.communicate()


def rest(connection: socket.socket) -> bytes:
    """All that still comes."""
    data = b""
    with connection:
        while more := connection.recv(65536):
            data += more
    return data


def test_sigterm_under_load_lets_short_answers_end_and_ends_long_ones(start) -> None:
    """No new connection; a short answer comes whole; a long one is ended in order; exit code 0."""
    server = start(drain_timeout=3.0)
    long = server.begun()
    short = socket.create_connection(("127.0.0.1", server.port), END_S)
    short.sendall(post(body(max_tokens=30)))  # 0.15 s, and on a busy machine a few times that
    kept = socket.create_connection(("127.0.0.1", server.port), END_S)
    kept.sendall(b"GET /load HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer_on(kept)[0] == 200
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)

    def refused() -> bool:
        try:
            socket.create_connection(("127.0.0.1", server.port), 1).close()
        except OSError:
            return True
        return False

    wait_for(refused)
    assert kept.recv(10) == b""  # an idle connection is closed
    answer = rest(short)
    assert b'"finish_reason":"length"' in answer
    assert b'"completion_tokens":30' in answer
    ending = rest(long)
    assert b"the server ended this answer" in ending
    assert b"[DONE]" in ending
    code, said = server.ended()
    assert code == 0, said
    assert "rows 0" in said
    assert time.monotonic() - began > 2.5
    kept.close()


def test_an_idle_server_ends_at_once(start) -> None:
    """Nothing is waited for that is not there; Ctrl-C is as good as SIGTERM."""
    server = start(drain_timeout=60)
    idle = socket.create_connection(("127.0.0.1", server.port), END_S)
    began = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    code, said = server.ended()
    assert code == 0, said
    assert time.monotonic() - began < 30
    idle.close()


def test_a_second_signal_ends_at_once(start) -> None:
    """Who asks twice does not want to wait; clients are told, and nothing has failed."""
    server = start(drain_timeout=60)
    stream = server.begun()
    unfinished = socket.create_connection(("127.0.0.1", server.port), END_S)
    unfinished.sendall(post(body())[:-5])
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.4)
    assert server.process.poll() is None
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    code, said = server.ended()
    assert code == 0, said
    assert time.monotonic() - began < 30
    assert "Traceback" not in said
    told = rest(stream)
    assert b"the server ended this answer" in told
    assert b"[DONE]" in told
    assert rest(unfinished) == b""


@pytest.mark.slow
def test_a_client_that_takes_nothing_delays_no_end(start) -> None:
    """The end waits for answers, not for their readers."""
    server = start(drain_timeout=0.5)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", server.port))
    fields = body(prompt=["a"] * 8, n=4, max_tokens=ENDLESS, stream=True, logprobs=5)
    slow.sendall(post(fields))
    time.sleep(1.5)
    server.process.send_signal(signal.SIGTERM)
    code, said = server.ended()
    assert code == 0, said
    slow.close()


def test_an_engine_that_dies_ends_the_process(start) -> None:
    """Clients are told; the exit code is not 0, so that somebody starts it again."""
    server = start(die_at=60)
    stream = server.begun()
    told = rest(stream)
    assert b"the machine is on fire" in told
    code, said = server.ended()
    assert code == 1, said
    assert "RuntimeError: the machine is on fire" in said.partition("the server ends")[2]


def test_a_unix_socket_is_served_and_removed(start, tmp_path: Path) -> None:
    """A file that an earlier server left is no obstacle, a server that runs is one."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    server = start(uds=path)
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path))) as client:
        assert client.get("http://x/health").status_code == 200
        assert client.post(f"http://x{PATH}", json=body()).status_code == 200
    with pytest.raises(ConfigError, match="another server listens"):
        life.bound(ServerSettings(uds=str(path)))
    server.process.send_signal(signal.SIGTERM)
    code, said = server.ended()
    assert code == 0, said
    assert not path.exists()


def test_a_port_that_is_taken_is_told() -> None:
    """In three parts, before anything is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1 port {port}"):
            life.bound(ServerSettings(port=port))
    with pytest.raises(ConfigError, match=r"cannot listen at 203\.0\.113\.7 port 0"):
        life.bound(ServerSettings(host="203.0.113.7", port=0))


def test_threads_take_turns_quickly_while_a_server_runs() -> None:
    """A setting of the whole process: made for the server's time alone."""
    before = sys.getswitchinterval()
    with life.quick_turns():
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before


def test_a_shells_limit_of_open_files_is_no_limit_of_connections() -> None:
    """Many systems give 1,024 to a program that does not ask for more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = 1 << 40 if before[1] == resource.RLIM_INFINITY else before[1]
    low = (min(1024, hard), before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, low)
    try:
        with life.many_connections():
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 65_536)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == low
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
