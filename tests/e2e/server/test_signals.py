"""A real server and a real engine at their end: signals under load, and an engine that dies."""

from __future__ import annotations

import json
import socket
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.local_server import PATH, answer_on, post, rest, until, wait_for
from tests.server_process import LIMIT_S, ServerProcess, running

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FLAGS = ("--served-model-name", "tiny", "--max-rows", "2", "--spec", "suffix", "--no-adaptive")
ENDLESS = 60_000  # tokens: minutes


def fragile(
    model: Path, folder: Path, word: Path, *flags: str
) -> AbstractContextManager[ServerProcess]:
    """A server whose engine does what a file says."""
    program, variable = "tests.fragile_server", {"FRAGILE_SERVER": str(word)}
    return running(model, folder, *FLAGS, *flags, module=program, **variable)


def opened(server: ServerProcess, fields: dict[str, Any], path: str = PATH) -> socket.socket:
    """A request that was sent."""
    connection = server.connected()
    connection.sendall(post(fields, path))
    return connection


def streaming(server: ServerProcess, fields: dict[str, Any], path: str = PATH) -> socket.socket:
    """A stream that was let in."""
    connection = opened(server, fields | {"stream": True}, path)
    assert connection.recv(15) == b"HTTP/1.1 200 OK"
    return connection


def events(data: bytes) -> list[Any]:
    """The events of a stream; [DONE] as it is."""
    lines = [line[6:] for line in data.splitlines() if line.startswith(b"data: ")]
    return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


def text_of(found: list[Any]) -> str:
    """What the chunks of a completion say."""
    return "".join(c["text"] for e in found if "choices" in e for c in e["choices"])


def test_sigterm_under_load_lets_what_was_taken_end_whole(long_model: Path, tmp_path: Path) -> None:
    """Two streams run, more answers wait: all come whole. Whoever is later is refused. Exit code 0."""
    word = tmp_path / "word"
    short = {"prompt": "the end", "max_tokens": 40, "seed": 3, "ignore_eos": True}
    long = short | {"max_tokens": 200, "stream_options": {"include_usage": True}}
    items = {"input": "the end", "max_output_tokens": 40, "ignore_eos": True}
    with fragile(long_model, tmp_path, word, "--drain-timeout", str(LIMIT_S)) as server:
        with httpx2.Client(base_url=server.url, timeout=LIMIT_S) as client:
            expected = client.post(PATH, json=short).json()["choices"][0]["text"]
            word.write_text("0")
            idle, late = server.connected(), server.connected()
            idle.sendall(b"GET /load HTTP/1.1\r\nhost: x\r\n\r\n")
            assert answer_on(idle)[0] == 200
            late.sendall(post(short)[:-5])
            run = [streaming(server, long) for _ in "ab"]
            word.write_text("80")  # steps: both begin, and are not at their end
            told = [until(connection, b"data: ") for connection in run]  # both rows are taken
            waits = [streaming(server, short) for _ in "ab"]
            responds = streaming(server, items, RESPONSES)
            whole = opened(server, short)
            wait_for(lambda: client.get("/load").json()["server_load"] == 6, LIMIT_S)
        server.send_signal()
        server.wait_to_say("no more requests are taken; 6 answers have")
        late.sendall(post(short)[-5:])
        refusal = rest(late)
        assert refusal.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: " in refusal.lower()
        assert b'"service_unavailable_error"' in refusal
        wait_for(server.refuses, LIMIT_S)
        assert rest(idle) == b""
        word.unlink()
        for connection, begin in zip(run, told, strict=True):
            found = events(begin + rest(connection))
            assert found[-1] == "[DONE]"
            assert found[-2]["usage"]["completion_tokens"] == 200
            assert found[-3]["choices"][0]["finish_reason"] == "length"
            assert text_of(found).startswith(expected[:-4])  # half a character may be its end
        for connection in waits:
            found = events(rest(connection))
            assert (text_of(found), found[-1]) == (expected, "[DONE]")
        last = events(rest(responds))[-1]
        assert last["response"]["usage"]["output_tokens"] == 40
        assert answer_on(whole)[1]["choices"][0]["text"] == expected
        code, log = server.ended()
    assert code == 0, log
    assert "Traceback" not in log
    assert "answers were ended" not in log


@pytest.mark.parametrize("twice", [False, True], ids=["the limit passes", "a second signal"])
def test_what_cannot_end_in_time_is_ended(long_model: Path, tmp_path: Path, twice: bool) -> None:
    """Running, waiting, streamed or not: each is told why, in its own form; still exit code 0."""
    fields = {"prompt": "the end", "max_tokens": ENDLESS, "ignore_eos": True}
    talk = {"messages": [{"role": "user", "content": "the end"}], "max_tokens": ENDLESS}
    items = {"input": "the end", "max_output_tokens": ENDLESS, "ignore_eos": True}
    limit = "100000" if twice else "0.3"
    with fragile(long_model, tmp_path, tmp_path / "none", "--drain-timeout", limit) as server:
        text = streaming(server, fields)
        chat = streaming(server, talk | {"ignore_eos": True}, CHAT)
        until(text, b"data: ")
        until(chat, b'"content"')
        waits = streaming(server, fields)
        responds = streaming(server, items, RESPONSES)
        server.send_signal()
        if twice:
            server.wait_to_say("no more requests are taken")
            server.send_signal()
        for connection in (text, chat, waits):
            *_, error, done = events(rest(connection))
            assert done == "[DONE]"
            assert (error["error"]["type"], error["error"]["code"]) == (
                "service_unavailable_error",
                503,
            )
            assert "the server ended this answer" in error["error"]["message"]
        last = events(rest(responds))[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        code, log = server.ended()
    assert code == 0, log
    assert "Traceback" not in log
    assert ("again: ending at once" if twice else "answers were ended") in log


def test_an_engine_that_dies_is_told_and_ends_the_process(long_model: Path, tmp_path: Path) -> None:
    """Its streams and whole answers fail, /health is red, nothing more is taken, and the exit code is 1."""
    word = tmp_path / "word"
    fields = {"prompt": "the end", "max_tokens": ENDLESS, "ignore_eos": True}
    with fragile(long_model, tmp_path, word) as server:
        whole = opened(server, fields)
        stream = streaming(server, fields)
        # Sent ahead on the same connection, so they are asked at once when the stream has failed; the
        # server then has seconds, in which it needs nothing of its client.
        for path in ("/health", "/ready"):
            stream.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        stream.sendall(post(fields))
        told = until(stream, b"data: ")
        word.write_text("die")
        told += rest(stream)
        status, failure = answer_on(whole)
        code, log = server.ended()
    first, *ahead = told.split(b"HTTP/1.1 ")
    *_, error, done = events(first)
    assert done == "[DONE]"
    assert error["error"]["type"] == "server_error"
    assert "the machine is on fire" in error["error"]["message"]
    assert [int(answer[:3]) for answer in ahead] == [503, 503, 500]
    assert (status, failure["error"]["code"]) == (500, "engine_stopped")
    assert code == 1, log
    assert "RuntimeError: the machine is on fire" in log.partition("the server ends")[2]
