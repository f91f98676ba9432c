"""One connection: requests sent ahead of answers, bodies that cannot be parsed, clients that go."""

from __future__ import annotations

import logging
import time

import pytest

from tests.local_server import (
    ENDLESS,
    PATH,
    LocalServer,
    answer_on,
    body,
    local_server,
    post,
    wait_for,
)

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = (
    f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    "transfer-encoding: chunked\r\n\r\n"
).encode()


@pytest.fixture(scope="module")
def server():
    with local_server(max_len=10**6, on_step=lambda _: time.sleep(0.002)) as found:
        yield found


@pytest.fixture(autouse=True)
def still_well(server: LocalServer, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.ERROR):
        yield
        with server.client() as client:
            assert client.post(PATH, json=body()).status_code == 200
        server.settle()
    assert caplog.record_tuples == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("first", [0, 2])
def test_a_client_that_sent_ahead_and_left_is_forgotten(
    server: LocalServer, stream: bool, first: int
) -> None:
    """The answer under way ends, though a later request was the connection's last word."""
    with server.raw() as connection:
        ask = post(body(max_tokens=ENDLESS, stream=stream))
        connection.sendall(HEALTH * first + ask + HEALTH * 2)
        wait_for(lambda: server.engine._open)
        time.sleep(0.05)  # the second request is there too
    server.settle()


@pytest.mark.parametrize(
    "chunk",
    [b"zz\r\n{}\r\n0\r\n\r\n", b"-1\r\n{}\r\n", b"1\r\n{}\r\n0\r\n\r\n", b"f" * 20 + b"\r\n"],
)
def test_a_body_that_cannot_be_parsed_is_told_so(server: LocalServer, chunk: bytes) -> None:
    """Chunks of the wrong size: 400, and the connection ends."""
    with server.raw() as connection:
        connection.sendall(CHUNKED + chunk)
        status, told = answer_on(connection)
        assert (status, told["error"]["type"]) == (400, "invalid_request_error")
        assert connection.recv(10) == b""


def test_junk_after_a_request_is_not_its_answer(server: LocalServer) -> None:
    """What stands against a later request is never told as the earlier one's answer."""
    with server.raw() as connection:
        connection.sendall(post(body(max_tokens=ENDLESS)) + b"\x00\x01\r\n\r\n")
        assert connection.recv(10) == b""


def test_only_so_many_requests_may_be_sent_ahead(server: LocalServer) -> None:
    """Whoever asks without end while an answer is under way holds no memory for it."""
    with server.raw() as connection:
        connection.sendall(post(body(max_tokens=ENDLESS)))
        wait_for(lambda: server.engine._open)
        with pytest.raises(OSError, match=r"reset|pipe"):
            connection.sendall(HEALTH * 200_000)
