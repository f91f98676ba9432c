"""Connections to a server on a real socket: kept, replaced, lost."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

import pytest

from paceline.bench.serve_client import Answer, ask
from paceline.bench.serve_connection import ExchangeError
from paceline.bench.serve_http import Address, HttpClient
from paceline.core.errors import ConfigError
from tests.fake_openai import CLOSE, FakeServer, answer, delta, event, head, whole

BODY = b'{"model": "fake"}'


def sequence(server: FakeServer, count: int, pause: float = 0.0) -> list[Answer]:
    async def run() -> list[Answer]:
        found = []
        async with HttpClient(Address.parse(server.url), api_key="k", timeout=60) as client:
            for _ in range(count):
                found.append(await ask(client, "chat", BODY))
                await asyncio.sleep(pause)
        return found

    return asyncio.run(run())


def test_connections_are_kept_and_carry_the_key() -> None:
    """A connection per request would measure connecting."""
    with FakeServer() as server:
        answers = sequence(server, 3)
        assert [a.text for a in answers] == ["Hello world"] * 3
        assert server.connections == 1
        assert {a.headers["authorization"] for a in server.asked} == {"Bearer k"}


@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_a_connection_that_the_server_closed_is_replaced(pause: float) -> None:
    """Whether that is seen before the next request or only by it."""
    with FakeServer(lambda _: [*answer("a"), CLOSE]) as server:
        assert [a.failure for a in sequence(server, 3, pause)] == [None] * 3
        assert len(server.asked) == 3


def test_a_request_is_sent_again_only_if_nothing_came_back() -> None:
    """A server may close a kept connection as it is used again; what it has begun, it has taken."""
    replies = iter([answer("a"), [CLOSE], answer("b")])
    with FakeServer(lambda _: next(replies)) as server:
        assert [a.text for a in sequence(server, 2)] == ["a", "b"]
        assert len(server.asked) == 3
    replies = iter([answer("a"), [head(), CLOSE]])
    with FakeServer(lambda _: next(replies)) as server:
        failure = sequence(server, 2)[1].failure
        assert failure is not None
        assert len(server.asked) == 2
    with FakeServer(lambda _: [CLOSE]) as server:
        failure = sequence(server, 1)[0].failure
        assert failure is not None
        assert failure.kind == "connection lost"
        assert len(server.asked) == 1


def test_a_server_may_ask_for_a_connection_of_each_request_s_own() -> None:
    """`Connection: close` counts before it is done."""
    body = b"".join([event(delta("stop", content="a")), event("[DONE]")])
    reply = [
        head("text/event-stream", "200 OK", "Connection: close", f"Content-Length: {len(body)}")
    ]
    with FakeServer(lambda _: [*reply, body]) as server:
        assert [a.text for a in sequence(server, 2)] == ["a", "a"]
        assert server.connections == 2


def test_early_hints_are_no_answer() -> None:
    """1xx responses come before the response."""
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    with FakeServer(lambda _: [hints, *answer("a")]) as server:
        (got,) = sequence(server, 1)
    assert (got.failure, got.text) == (None, "a")


def test_more_than_the_answer_ends_the_connection() -> None:
    """A server that says more than it was asked is not asked again over that connection."""
    with FakeServer(lambda _: [b"".join(answer("a") + whole({"more": 1}))]) as server:
        assert [a.text for a in sequence(server, 2)] == ["a", "a"]
        assert server.connections == 2


@pytest.mark.parametrize(
    "url,shown",
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/v1/", "http://localhost:8000"),
        ("https://example.org/llm/v1", "https://example.org:443/llm"),
        ("http://[::1]:80/", "http://[::1]:80"),
    ],
)
def test_a_url_may_end_with_v1(url: str, shown: str) -> None:
    """As clients of either habit write it."""
    assert str(Address.parse(url)) == shown


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "http://a:b", "http://u:p@host", "http://a?b=c"]
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    """Said how one looks."""
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        Address.parse(url)


def test_a_key_with_a_line_end_is_refused() -> None:
    """It would end the header."""
    with pytest.raises(ConfigError, match="line end"):
        HttpClient(Address.parse("http://a"), api_key="a\r\nb: c", timeout=1)


def test_tls_with_a_server_that_has_none_is_no_connection() -> None:
    """As is a certificate that nobody knows."""
    with FakeServer() as server:

        async def run() -> Answer:
            address = Address.parse(server.url.replace("http:", "https:"))
            async with HttpClient(address, timeout=60) as client:
                return await ask(client, "chat", BODY)

        failure = asyncio.run(run()).failure
    assert failure is not None
    assert failure.kind == "no connection"
    assert re.search(r"https://127\.0\.0\.1:\d+: .", failure.message)


def test_without_the_parser_the_way_to_get_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with the server's extra."""
    monkeypatch.setitem(sys.modules, "httptools", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[server\]'"):
        HttpClient(Address.parse("http://a"), timeout=1)


def test_bytes_go_on_while_the_reader_breaks() -> None:
    """What breaks in a sink is raised where the request was sent, and the connection is not kept."""

    class Broken:
        def begin(self, status: int, headers: Any) -> None:
            pass

        def feed(self, at: float, data: bytes) -> None:
            msg = "mine"
            raise KeyError(msg)

    with FakeServer() as server:

        async def run() -> None:
            async with HttpClient(Address.parse(server.url), timeout=60) as client:
                with pytest.raises(KeyError, match="mine"):
                    await client.send("POST", "/v1/chat/completions", BODY, Broken())
                assert client._idle == []

        asyncio.run(run())


def test_a_lost_connection_is_an_error_of_its_own() -> None:
    """Pages that are no answers raise it."""
    with FakeServer(pages={"/x": lambda: [CLOSE]}) as server:

        async def run() -> None:
            async with HttpClient(Address.parse(server.url), timeout=60) as client:
                with pytest.raises(ExchangeError, match="before the answer"):
                    await client.get("/x")

        asyncio.run(run())
