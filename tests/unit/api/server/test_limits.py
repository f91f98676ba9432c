"""Bodies, headers and connections: what is not let in, and with which status."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from paceline.api.server.limits import json_depth
from paceline.api.server.settings import ServerSettings
from tests.local_server import PATH, LocalServer, answer_on, body, local_server, post, wait_for

SETTINGS = ServerSettings(
    served_model_name=("tiny",),
    max_body_bytes=4096,
    max_json_depth=10,
    max_header_bytes=2048,
    max_headers=20,
)


@pytest.fixture(scope="module")
def server():
    with local_server(settings=SETTINGS) as found:
        yield found


@pytest.fixture(scope="module")
def hasty():
    """A server that waits for no body and no headers."""
    with local_server(settings=ServerSettings(body_timeout=0.4)) as found:
        yield found


@pytest.fixture(autouse=True)
def still_well(server: LocalServer):
    yield
    with server.client() as client:
        assert client.post(PATH, json=body()).status_code == 200
    server.settle()


def sent(server: LocalServer, *parts: bytes) -> tuple[int, dict]:
    with server.raw() as connection:
        for part in parts:
            connection.sendall(part)
        return answer_on(connection)


# -- bodies ---------------------------------------------------------------------------------------


def test_a_long_body_is_refused_before_it_is_read(server: LocalServer) -> None:
    """The stated length is enough; the connection can be used again."""
    long = b"x" * 5000
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" % PATH.encode()
    with server.raw() as connection:
        connection.sendall(head + b"content-length: 5000\r\n\r\n" + long[:10])
        status, told = answer_on(connection)
        assert (status, told["error"]["code"]) == (413, "request_too_large")
        connection.sendall(long[10:])
        connection.sendall(post(body()))
        assert answer_on(connection)[0] == 200


def test_an_absurd_length_ends_the_connection(server: LocalServer) -> None:
    """Nobody waits for a terabyte to be thrown away."""
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000000\r\n\r\n" % PATH.encode()
    with server.raw() as connection:
        connection.sendall(head)
        assert answer_on(connection)[0] == 413
        assert connection.recv(10) == b""


def test_a_long_body_in_chunks_is_refused_too(server: LocalServer) -> None:
    """A body without a stated length is counted as it comes; the client sees the answer."""
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % PATH.encode()
    chunk = b"3e8\r\n" + b"x" * 1000 + b"\r\n"
    assert sent(server, head, *[chunk] * 10, b"0\r\n\r\n")[0] == 413


def test_a_body_in_chunks_within_the_limit_is_read(server: LocalServer) -> None:
    """Chunks are put together, wherever they are cut."""
    head = (
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    ) % PATH.encode()
    text = json.dumps(body()).encode()
    chunks = [b"1\r\n" + text[i : i + 1] + b"\r\n" for i in range(len(text))]
    assert sent(server, head, *chunks, b"0\r\n\r\n")[0] == 200


def test_a_body_that_does_not_come_is_not_waited_for(hasty: LocalServer) -> None:
    """After a time the place is free again: 408, and the connection ends."""
    with hasty.raw() as connection:
        connection.sendall(post(body())[:-5])
        assert answer_on(connection)[0] == 408


def test_a_client_that_leaves_within_its_body_is_forgotten(server: LocalServer) -> None:
    """Nothing is answered, nothing is left."""
    with server.raw() as connection:
        connection.sendall(post(body())[:-5])
        wait_for(lambda: server.num_connections == 1)
    wait_for(lambda: server.num_connections == 0)


@pytest.mark.parametrize(
    "kind,status",
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
def test_only_json_is_read(server: LocalServer, kind: str, status: int) -> None:
    """A form is not JSON, whatever it holds."""
    with server.client() as client:
        headers = {"content-type": kind}
        assert client.post(PATH, content=json.dumps(body()), headers=headers).status_code == status


@pytest.mark.parametrize("coding,status", [("gzip", 415), ("br, gzip", 415), ("identity", 200)])
def test_a_compressed_body_is_told_what_it_is(
    server: LocalServer, coding: str, status: int
) -> None:
    """Not that it is no JSON."""
    with server.client() as client:
        headers = {"content-type": "application/json", "content-encoding": coding}
        answer = client.post(PATH, content=json.dumps(body()), headers=headers)
    assert answer.status_code == status
    if status != 200:
        assert "send it uncompressed" in answer.json()["error"]["message"]


def test_a_web_socket_is_answered_in_http_and_logs_nothing(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    """uvicorn would advise an operator to install what nobody here uses."""
    offer = (
        b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
    )
    with caplog.at_level("INFO"), server.raw() as connection:
        connection.sendall(offer)
        assert connection.recv(12) == b"HTTP/1.1 200"
    assert "pip install" not in caplog.text


@pytest.mark.parametrize(
    "text,depth",
    [
        (b"", 0),
        (b"1", 0),
        (b"[]", 1),
        (b'{"a": [1, {"b": 2}]}', 3),
        (b'{"a": "[[[[{{{{"}', 1),
        (rb'{"a": "\"[[[", "b": "\\"}', 1),
        (b'{"a": "[[[ no end', 1),
        (b"[[],[],[[]]]", 3),
        (b"]]]][[", 0),
        (b"[" * 100_000, 100_000),
        (b"[]" * 1_000_000, 1),
    ],
)
def test_depth_is_that_of_brackets_outside_strings(text: bytes, depth: int) -> None:
    """Brackets within texts nest nothing; broken JSON has a depth too."""
    assert json_depth(text) == depth


def test_deep_json_is_refused_before_it_is_parsed(server: LocalServer) -> None:
    """Ten levels are possible here, eleven are not."""
    with server.client() as client:
        for extra, status in ((9, 200), (10, 400)):
            text = json.dumps(body())[:-1] + ', "x": ' + "[" * extra + "]" * extra + "}"
            answer = client.post(PATH, content=text, headers={"content-type": "application/json"})
            assert answer.status_code == status
        assert "11 levels deep; 10 are possible" in answer.json()["error"]["message"]


# -- headers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\nlong: " + b"a" * 3000 + b"\r\n\r\n",
        b"GET /health?" + b"a" * 3000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 30 + b"\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nendless: " + b"a" * 9000,
    ],
)
def test_headers_beyond_the_limits_end_the_connection(server: LocalServer, head: bytes) -> None:
    """Long ones, many, and one that never ends: 431."""
    status, told = sent(server, head)
    assert (status, told["error"]["code"]) == (431, 431)


def test_headers_within_the_limits_are_fine(server: LocalServer) -> None:
    """The limit itself is possible, and a body does not count as headers."""
    fields = body(prompt="the end " * 10, user="u" * 3000)
    assert sent(server, post(fields, long="a" * 1500))[0] == 200


def test_headers_that_come_slowly_are_not_waited_for(hasty: LocalServer) -> None:
    """A byte now and then keeps no connection."""
    with hasty.raw() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost")
        assert answer_on(connection)[0] == 408


def test_a_connection_that_says_nothing_is_closed() -> None:
    """As one is that has nothing more to say."""
    settings = ServerSettings(timeout_keep_alive=2.0)  # enough for what is said below
    with local_server(settings=settings) as server, server.raw() as kept, server.raw() as silent:
        kept.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer_on(kept)[0] == 200
        assert silent.recv(10) == b""
        assert kept.recv(10) == b""


def test_an_offer_of_another_protocol_is_passed_over(server: LocalServer) -> None:
    """Java's client offers HTTP/2 with its first request; the request's body must not be lost."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAE"}
    with server.raw() as connection:
        for _ in range(2):
            connection.sendall(post(body(user="\r\nUpgrade: h2c"), **offer))
            assert answer_on(connection)[0] == 200


@pytest.mark.parametrize("junk", [b"\x00\x01\x02\r\n\r\n", b"HELLO\r\n\r\n", b"GET\r\n\r\n"])
def test_what_is_no_http_is_told_so(server: LocalServer, junk: bytes) -> None:
    """400 in the same form as every other error."""
    status, told = sent(server, junk)
    assert (status, told["error"]["type"]) == (400, "invalid_request_error")


def test_requests_in_a_row_are_answered_in_their_order(server: LocalServer) -> None:
    """Sent before the first is answered, on one connection."""
    with server.raw() as connection:
        connection.sendall(post(body(max_tokens=3)) + post(body(max_tokens=2)))
        for tokens in (3, 2):
            status, told = answer_on(connection)
            assert (status, told["usage"]["completion_tokens"]) == (200, tokens)


# -- connections and answers ---------------------------------------------------------------------


def test_a_server_for_no_more_connections_says_so() -> None:
    """Connections beyond the limit get 503, the others are served."""
    settings = ServerSettings(max_connections=3)
    ask = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    with local_server(settings=settings) as server, server.raw() as one, server.raw() as two:
        with server.raw() as three, server.raw() as extra:
            for connection, status in ((extra, 503), (one, 200), (two, 200), (three, 200)):
                connection.sendall(ask)
                assert answer_on(connection)[0] == status

        def let_in() -> bool:
            with server.raw() as three:
                three.sendall(ask)
                return answer_on(three)[0] == 200

        wait_for(let_in)


def test_an_answer_that_nobody_takes_is_let_go() -> None:
    """A whole answer waits in memory for its reader, but not for ever."""
    settings = ServerSettings(timeout_keep_alive=2.0)  # enough for the request to come
    with (
        local_server(settings=settings, send_buffer=2**16) as server,
        socket.socket() as slow,
    ):
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        fields = body(prompt=["a"] * 8, n=4, max_tokens=100, logprobs=20)
        slow.sendall(post(fields))
        assert slow.recv(15) == b"HTTP/1.1 200 OK"
        wait_for(lambda: server.num_connections == 0)
        taken = b""
        with contextlib.suppress(ConnectionResetError):
            while data := slow.recv(1 << 20):
                taken += data
        length = int(taken.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert len(taken) < length, "all of it had been kept"
