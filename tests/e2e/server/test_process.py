"""The server's process: signals, exit codes, sockets. Its engine is a fake one, whose answers have no end."""

from __future__ import annotations

import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from paceline.api.server import life
from paceline.api.server.settings import ServerSettings
from paceline.core.errors import ConfigError
from tests.local_server import ENDLESS, PATH, answer_on, begun, body, post, rest, wait_for
from tests.server_process import LIMIT_S, ServerProcess, serving

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts a server with these settings."""
    with ExitStack() as made:

        def begin(**settings: object) -> ServerProcess:
            port = tmp_path / "port"
            words = [f"{name}={value}" for name, value in settings.items()]
            program = ["tests.fake_server", str(port), *words]
            return made.enter_context(serving(program, port, tmp_path / "log"))

        yield begin


def test_signals_under_load_let_short_answers_end_and_then_end_long_ones(start) -> None:
    """No new connection; a short answer comes whole. Who asks twice does not want to wait for a long one."""
    server = start(drain_timeout=600, last_words=60)
    long, short, kept, unfinished = (server.connected() for _ in range(4))
    begun(long)
    short.sendall(post(body(max_tokens=30)))  # sent, and seldom at its end, when the signal comes
    kept.sendall(HEALTH)
    assert answer_on(kept)[0] == 200
    unfinished.sendall(post(body())[:-5])
    server.send_signal()
    wait_for(server.refuses, LIMIT_S)
    assert kept.recv(10) == b""  # an idle connection is closed
    answer = rest(short)
    assert b'"finish_reason":"length"' in answer
    assert b'"completion_tokens":30' in answer
    server.wait_to_say("no more requests are taken")
    assert server.process.poll() is None
    server.send_signal()
    ending = rest(long)
    assert b"the server ended this answer" in ending
    assert b"[DONE]" in ending
    server.send_signal()  # whoever asks once more does not wait for a request to come, either
    assert rest(unfinished) == b""
    code, said = server.ended()
    assert code == 0, said
    assert "rows 0" in said
    assert "Traceback" not in said


def test_an_idle_server_ends_at_once(start) -> None:
    """Nothing is waited for that is not there; Ctrl-C is as good as SIGTERM."""
    server = start(drain_timeout=600)
    server.connected()
    server.send_signal(signal.SIGINT)
    code, said = server.ended()
    assert code == 0, said


def test_a_terminal_that_closes_lets_answers_end(start) -> None:
    """SIGHUP drains as SIGTERM does, and that it comes twice means nothing."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a child inherits that it is ignored
    try:
        server = start(drain_timeout=0.5)
    finally:
        signal.signal(signal.SIGHUP, before)
    stream = begun(server.connected())
    for _ in range(2):
        server.send_signal(signal.SIGHUP)
    told = rest(stream)
    assert b"the server ended this answer" in told
    assert b"[DONE]" in told
    code, said = server.ended()
    assert code == 0, said
    assert "again: ending at once" not in said


def test_a_server_under_nohup_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has hang-ups ignored wants no end then."""
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)
    assert life._signals() == [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)
    assert life._signals() == [signal.SIGTERM, signal.SIGINT]


def test_the_time_for_answers_passes(start) -> None:
    """Then they are ended in order, not before; and nothing has failed."""
    server = start(drain_timeout=0.5)
    long = begun(server.connected())
    began = time.monotonic()
    server.send_signal()
    ending = rest(long)
    assert time.monotonic() - began >= 0.5
    assert b"the server ended this answer" in ending
    assert b"[DONE]" in ending
    code, said = server.ended()
    assert code == 0, said
    assert "rows 0" in said


@pytest.mark.slow
def test_a_client_that_takes_nothing_delays_no_end(start) -> None:
    """The end waits for answers, not for their readers."""
    server = start(drain_timeout=0.5)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", server.port))
    fields = body(prompt=["a"] * 8, n=4, max_tokens=ENDLESS, stream=True, logprobs=5)
    slow.sendall(post(fields))
    time.sleep(1.5)  # it stops taking, as a rule; the server has to end however far it has come
    server.send_signal()
    code, said = server.ended()
    assert code == 0, said
    slow.close()


def test_an_engine_that_dies_ends_the_process(start) -> None:
    """Clients are told; the exit code is not 0, so that somebody starts it again."""
    server = start(die_at=60)
    told = rest(begun(server.connected()))
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
    server.send_signal()
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
