"""The client against a server on a real socket that misbehaves in the usual ways."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from paceline.bench.serve_client import Answer, AnswerReader, ask, served_models
from paceline.bench.serve_http import Address, HttpClient
from paceline.core.errors import PacelineError
from tests.fake_openai import (
    CLOSE,
    FakeServer,
    answer,
    chunked,
    delta,
    event,
    head,
    usage,
    whole,
)

BODY = b'{"model": "fake"}'


def asked(reply: Any, endpoint: str = "chat", timeout: float = 60.0, **options: Any) -> Answer:
    """The answer that a reply is read as."""
    replies = reply if callable(reply) else lambda _: reply

    async def run(url: str) -> Answer:
        async with HttpClient(Address.parse(url), timeout=timeout, **options) as client:
            return await ask(client, endpoint, BODY)

    with FakeServer(replies) as server:
        return asyncio.run(run(server.url))


def test_an_answer_has_its_text_and_the_server_s_counts() -> None:
    """Tokens by usage, however they are cut into chunks."""
    got = asked(answer("Hel", "lo €", tokens=7))
    assert (got.failure, got.text, got.finish_reason) == (None, "Hello €", "stop")
    assert (got.prompt_tokens, got.output_tokens, got.cached_tokens) == (5, 7, None)
    assert got.ttft is not None
    assert got.e2e is not None
    assert 0 < got.ttft <= got.e2e
    assert len(got.gaps) == 1


def test_times_are_those_of_the_packets() -> None:
    """First content, not the first chunk; the end is the finish, not the usage; gaps of content only."""
    reader = AnswerReader()
    reader.begin(200, {"content-type": "text/event-stream"})
    role = event(delta(role="assistant", content=""))
    for at, data in (
        (0.1, b": ping\n\n" + role),
        (0.5, event(delta(content="a"))[:9]),
        (0.6, event(delta(content="a"))[9:]),
        (0.8, event(delta(content="b")) + event(delta(content="c"))),
        (1.6, event(delta("stop"))),
        (5.0, event(usage(6)) + event("[DONE]")),
    ):
        reader.feed(reader.started + at, data)
    got = reader.answer()
    assert (got.failure, got.text) == (None, "abc")
    assert (got.ttft, got.e2e, got.tpot) == pytest.approx((0.6, 1.6, 0.2))
    assert got.gaps == pytest.approx((0.2, 0.0))


def test_text_completions_are_read_too() -> None:
    """The other endpoint has its text at another place."""

    def reply(request: Any) -> list[Any]:
        assert request.path == "/v1/completions"
        chunk = {"choices": [{"index": 0, "text": "abc", "finish_reason": "length"}]}
        details = {"prompt_tokens_details": {"cached_tokens": 4}}
        return chunked(event(chunk), event(usage(3, **details)), event("[DONE]"))

    got = asked(reply, "completions")
    assert (got.text, got.finish_reason, got.output_tokens, got.cached_tokens) == (
        "abc",
        "length",
        3,
        4,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
def test_whatever_is_generated_is_content(fields: dict[str, Any]) -> None:
    """The first token of a thought or a tool call is the first token."""
    got = asked(chunked(event(delta(content=None)), event(delta(**fields)), event(delta("stop"))))
    assert got.failure is None
    assert got.ttft is not None


def test_usage_may_come_in_every_chunk_or_never() -> None:
    """The last one counts; without one there is no time per token, and chunks are not counted."""
    chunks = [delta(content=c) | {"usage": usage(i + 1)["usage"]} for i, c in enumerate("abc")]
    assert asked(chunked(*map(event, chunks), event(delta("stop")))).output_tokens == 3
    got = asked(chunked(event(delta(content="a")), event(delta("stop", content="b"))))
    assert (got.failure, got.output_tokens, got.tpot) == (None, None, None)
    assert asked(answer("a", tokens=1)).tpot is None


def test_speculation_is_read_where_servers_put_it() -> None:
    """vLLM's metrics and llama.cpp's timings."""
    told = {"num_spec_steps": 4, "num_draft_tokens": 20, "num_accepted_draft_tokens": 6}
    got = asked(answer("a", metrics={"speculative_decoding": told})).speculation
    assert got is not None
    assert (got.num_steps, got.num_drafted, got.num_accepted, got.accept_length) == (4, 20, 6, 2.5)
    got = asked(answer("a", timings={"draft_n": 8, "draft_n_accepted": 3})).speculation
    assert got is not None
    assert (got.num_steps, got.num_accepted, got.accept_length) == (None, 3, None)
    assert asked(answer("a", metrics=None)).speculation is None


def test_the_wire_may_be_cut_anywhere() -> None:
    """CRLF, comments, data over several lines, characters across packets, an end without [DONE]."""
    chunk = json.dumps(delta("stop", content="é😀ש"), ensure_ascii=False).encode()
    first, second = chunk.split(b", ", 1)
    body = b": ping\r\n\r\ndata: " + first + b",\r\ndata: " + second + b"\r\n\r\n: ping\r\n\r\n"
    stream = b"".join(chunked(body))
    assert asked([stream[i : i + 1] for i in range(len(stream))]).text == "é😀ש"
    plain = head() + body  # neither length nor chunks: it ends with the connection
    got = asked([plain[:40], plain[40:90], plain[90:], CLOSE])
    assert (got.failure, got.text) == (None, "é😀ש")


@pytest.mark.parametrize(
    "reply,kind,message",
    [
        (whole({"error": {"message": "queue\n full"}}, "503 Busy"), "HTTP 503", "queue full"),
        (whole({"detail": "no key"}, "401 No"), "HTTP 401", "no key"),
        (whole(b"<html>gone</html>", "502 Bad", "text/html"), "HTTP 502", "<html>gone</html>"),
        (whole(delta("stop", content="a")), "no stream", "no event stream"),
        (chunked(event({"error": {"message": "out of memory"}})), "error in the stream", "out of"),
        (chunked(b'event: error\ndata: "bad"\n\n'), "error in the stream", "bad"),
        (chunked(event(delta(content="a")), event("{broken")), "bad data", "{broken"),
        (chunked(event("[1, 2]")), "bad data", "[1, 2]"),
        (chunked(event({"choices": [{"delta": {"content": 5}}]})), "bad data", "content"),
        (chunked(event(delta(content="a"))), "cut short", "without a finish_reason"),
        (chunked(event(delta("abort", content="a"))), "ended by the server", "'abort'"),
        ([*chunked(event(delta(content="a")))[:-1], CLOSE], "connection lost", "before the answer"),
        ([CLOSE], "connection lost", "before the answer"),
        ([b"SSH-2.0-OpenSSH_9\r\n"], "bad HTTP", "no HTTP/1.1"),
        (
            [head("text/event-stream", "200 OK", "Content-Length: 999"), CLOSE],
            "connection lost",
            "",
        ),
    ],
)
def test_failures_have_a_kind_and_what_was_said(reply: Any, kind: str, message: str) -> None:
    """They are counted by kind; nothing raises, and nothing counts as an answer."""
    got = asked(reply)
    assert got.failure is not None
    assert got.failure.kind == kind
    assert message in got.failure.message


def test_what_a_server_says_is_cut() -> None:
    """A page of HTML in each of a thousand failures is no record."""
    got = asked(whole({"error": {"message": "x" * 5000}}, "500 No"))
    assert got.failure is not None
    assert len(got.failure.message) < 400


def test_silence_is_a_timeout() -> None:
    """A server that hangs ends one request, not the bench; and it is let go."""
    with FakeServer(lambda _: [*chunked(event(delta(content="a")))[:-1], 60.0]) as server:

        async def run() -> Answer:
            async with HttpClient(Address.parse(server.url), timeout=3.0) as client:
                return await ask(client, "chat", BODY)

        got = asyncio.run(run())
        assert got.failure is not None
        assert (got.failure.kind, got.text) == ("timeout", "a")
        assert server.gone.wait(60)


def test_a_server_that_is_not_there() -> None:
    """Said with its address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        async def run() -> Answer:
            address = Address.parse(f"http://127.0.0.1:{port}")
            async with HttpClient(address, timeout=60) as client:
                return await ask(client, "chat", BODY)

        got = asyncio.run(run())
    assert got.failure is not None
    assert got.failure.kind == "no connection"
    assert f"127.0.0.1:{port}" in got.failure.message


@pytest.mark.parametrize(
    "page, way",
    [
        (whole({"data": []}), "--model"),
        (whole({"error": {"message": "no"}}, "403 No"), "--model"),
        (whole({"error": {"message": "no"}}, "401 No"), "wants a key: .*--api-key"),
        (whole([1]), "--model"),
    ],
)
def test_a_server_without_models_is_told_apart(page: Any, way: str) -> None:
    """With the way out: name one, or give a key."""
    with FakeServer(pages={"/v1/models": lambda: page}) as server:

        async def run() -> None:
            async with HttpClient(Address.parse(server.url), timeout=60) as client:
                with pytest.raises(PacelineError, match=way):
                    await served_models(client)

        asyncio.run(run())
