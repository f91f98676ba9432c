"""One connection: requests sent ahead of answers, bodies that cannot be parsed, clients that go."""

from __future__ import annotations

import json
import logging
import re
import socket
import time

import pytest

from paceline.api.server.encoding import encoded
from paceline.api.server.settings import ServerSettings
from tests.local_server import (
    ENDLESS,
    PATH,
    TIMEOUT,
    LocalServer,
    answer_on,
    body,
    local_server,
    post,
    rest,
    slowly,
    wait_for,
)

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = (
    f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    "transfer-encoding: chunked\r\n\r\n"
).encode()


BEARER = {"authorization": "Bearer key"}


@pytest.fixture(scope="module")
def server():
    with local_server(max_len=10**6, on_step=slowly) as found:
        yield found


@pytest.fixture(autouse=True)
def still_well(server: LocalServer, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.ERROR):
        yield
        with server.client() as client:
            assert client.post(PATH, json=body()).status_code == 200
        server.settle()
    assert caplog.record_tuples == []


def test_an_event_is_one_line_to_everybody() -> None:
    """Clients that split as Python does lose no event that holds a line end of Unicode."""
    text = "a\x0b\x1c\x85\u2028\u2029é🙂\r\n"
    data = encoded({"text": text})
    assert len(data.decode().splitlines()) == 1
    assert json.loads(data) == {"text": text}


def drip(connection: socket.socket, data: bytes) -> None:
    """Send little, again and again, until that is impossible."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        connection.sendall(data)
        time.sleep(0.06)


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


@pytest.mark.parametrize(
    "first,status,limits",
    [
        (b"\r\n", None, {"timeout_keep_alive": 0.5}),
        # Long enough for the request to come, however busy the machine is.
        (post(body(user="x" * 200))[:-100], 401, {"timeout_keep_alive": 2.0}),
        (
            post(body(user="x" * 200), **BEARER)[:-100],
            408,
            {"body_timeout": 0.5, "timeout_keep_alive": 2.0},
        ),
    ],
)
def test_a_connection_that_only_drips_is_closed(
    first: bytes, status: int | None, limits: dict[str, float]
) -> None:
    """What leads to no request, or belongs to one that was answered, keeps no connection open."""
    settings = ServerSettings(served_model_name=("tiny",), api_key=("key",), **limits)
    with local_server(settings=settings) as server, server.raw() as connection:
        connection.sendall(first)
        if status is not None:
            assert answer_on(connection)[0] == status
        with pytest.raises(OSError, match=r"reset|pipe"):
            drip(connection, first[-1:])


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


def whole(connection: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of an answer that ends with its connection."""
    head, _, found = rest(connection).partition(b"\r\n\r\n")
    return head.lower(), found


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_no_chunks(server: LocalServer, stream: bool) -> None:
    """Such a client would take the chunks' lengths for text; the connection's end is the body's."""
    asked = post(body(max_tokens=20, stream=stream)).replace(b"HTTP/1.1", b"HTTP/1.0")
    with server.raw() as connection:
        connection.sendall(asked)
        head, found = whole(connection)
    assert head.startswith(b"http/1.1 200")
    assert b"\r\nconnection: close" in head
    assert b"transfer-encoding" not in head
    assert (b"\r\ncontent-length: %d" % len(found) in head) == (not stream)
    if not stream:
        assert json.loads(found)["choices"][0]["finish_reason"] == "length"
        return
    events = found.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    texts = [json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events[:-2]]
    assert "".join(texts) == "abcdefghij" * 2


def test_streams_that_were_asked_for_ahead_come_one_after_the_other(server: LocalServer) -> None:
    """Each is sent by its own request's hand, past middleware, and ends before the next begins."""
    with server.raw() as connection:
        lengths = (20, 3, 11)
        connection.sendall(b"".join(post(body(max_tokens=n, stream=True)) for n in lengths))
        data = b""
        while data.count(b"\r\n0\r\n\r\n") < len(lengths):
            data += connection.recv(65536)
    answers = data.split(b"HTTP/1.1 200 OK\r\n")[1:]
    told = [re.findall(rb'"text":"([a-j]*)"', answer) for answer in answers]
    assert [b"".join(parts) for parts in told] == [(b"abcdefghij" * 2)[:n] for n in lengths]
    assert all(answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for answer in answers)


def test_http_1_0_may_ask_for_a_head_and_for_what_is_not_there(server: LocalServer) -> None:
    """Answers without a body, and short ones, end too."""
    for line, status in (
        (b"HEAD /health", b"200"),
        (b"GET /metrics", b"200"),
        (b"GET /no", b"404"),
    ):
        with server.raw() as connection:
            connection.sendall(line + b" HTTP/1.0\r\nhost: x\r\n\r\n")
            head, found = whole(connection)
        assert head.startswith(b"http/1.1 " + status)
        assert b"transfer-encoding" not in head
        assert bool(found) == (not line.startswith(b"HEAD"))


def test_a_client_of_http_1_0_that_leaves_ends_its_answer(server: LocalServer) -> None:
    """As with any other."""
    asked = post(body(max_tokens=ENDLESS, stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0")
    with server.raw() as connection:
        connection.sendall(asked)
        assert connection.recv(10)
    server.settle()
