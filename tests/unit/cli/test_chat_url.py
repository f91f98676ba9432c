from __future__ import annotations

import json
import signal
import sys
import threading
import time

import pytest

from tests.fake_openai import (
    CLOSE,
    FakeServer,
    answer,
    chunked,
    delta,
    event,
    usage,
    whole,
)

TOLD = {"num_spec_steps": 4, "num_draft_tokens": 9, "num_accepted_draft_tokens": 6}


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """What a user types; then Ctrl-D."""
    left = iter(lines)

    def read(_: str) -> str:
        for line in left:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", read)


def test_one_message_is_answered(run) -> None:
    """Text on stdout and nothing else; sampling and system message are sent, the model is asked for."""
    with FakeServer(lambda _: answer("Hé", "llo")) as server:
        ran = run(
            *("chat", "--url", server.url, "Hi", "--system", "Be short.", "--temperature", "0"),
            *("--stop", "x", "--logit-bias", '{"5": -1}', "--extra-body", '{"min_p": 0.1}'),
        )
        (asked,) = server.asked
    assert (ran.code, ran.out, ran.err) == (0, "Héllo\n", "")
    assert ran.engines == []
    assert asked.path == "/v1/chat/completions"
    assert asked.body == {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "Hi"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "top_p": 1.0,
        "max_tokens": 256,
        "stop": ["x"],
        "logit_bias": {"5": -1.0},
        "min_p": 0.1,
    }


def test_model_and_key_can_be_named(run) -> None:
    """Then the server's list is not asked for."""
    with FakeServer(pages={"/v1/models": lambda: [CLOSE]}) as server:
        ran = run("chat", "--url", server.url, "Hi", "--model", "mine", "--api-key", "sekret")
        assert ran.code == 0, ran.err
        assert server.asked[0].body["model"] == "mine"
        assert server.asked[0].headers["authorization"] == "Bearer sekret"


def test_remarks_have_the_accept_length(run) -> None:
    """Where the server tells it."""
    with FakeServer(lambda _: answer("a", metrics={"speculative_decoding": TOLD})) as server:
        ran = run("chat", "--url", server.url, "Hi", "--stats")
    assert "6 tokens" in ran.err
    assert "accept length 2.50 over 4 steps" in ran.err
    with FakeServer(lambda _: answer("a", timings={"draft_n": 9, "draft_n_accepted": 6})) as server:
        ran = run("chat", "--url", server.url, "Hi", "--stats")
    assert "6 of 9 drafted tokens accepted" in ran.err


def test_json_is_one_object(run) -> None:
    """For programs, with what the server tells."""
    with FakeServer(lambda _: answer("a", metrics={"speculative_decoding": TOLD})) as server:
        ran = run("chat", "--url", server.url, "Hi", "--json")
    row = json.loads(ran.out)
    assert (row["text"], row["finish_reason"], row["num_output_tokens"]) == ("a", "stop", 6)
    assert row["accept_length"] == 2.5


def test_reasoning_is_shown_apart_and_not_sent_back(run, monkeypatch) -> None:
    """It is no part of the answer: stdout and the conversation have none of it."""
    reply = chunked(
        event(delta(reasoning_content="let me [see]", reasoning="let me [see]")),
        event(delta(content="yes")),
        event(delta("stop")),
        event(usage(2)),
        event("[DONE]"),
    )
    typed(monkeypatch, "one", "two")
    with FakeServer(lambda _: reply) as server:
        ran = run("chat", "--url", server.url, "--stats", terminal=True)
        assert ran.code == 0, ran.err
        assert ran.out == "yes\nyes\n\n"
        assert ran.err.count("let me [see]\n") == 2
        assert server.asked[1].body["messages"][1] == {"role": "assistant", "content": "yes"}


def test_a_talk_remembers_and_forgets(run, monkeypatch) -> None:
    """History grows turn by turn; /clear forgets it; commands are never sent."""
    typed(monkeypatch, "one", "two", "/help", "/clear", "", "/nonsense", " /help", "/quit", "no")
    with FakeServer(lambda _: answer("yes")) as server:
        ran = run("chat", "--url", server.url, "--system", "s", terminal=True)
        assert ran.code == 0, ran.err
        told = [[m["content"] for m in a.body["messages"]] for a in server.asked]
    assert told == [["s", "one"], ["s", "one", "yes", "two"], ["s", "/help"]]
    assert "forget the conversation" in ran.err
    assert "no command /nonsense; /help lists them" in ran.err


def test_a_talk_outlives_a_server_s_errors(run, monkeypatch) -> None:
    """A turn that failed is said and not kept."""
    busy = whole({"error": {"message": "queue full"}}, "503 Busy")
    cut = [*chunked(event(delta(content="half")))[:-1], CLOSE]
    replies = iter([busy, cut, answer("yes")])
    typed(monkeypatch, "one", "two", "three")
    with FakeServer(lambda _: next(replies)) as server:
        ran = run("chat", "--url", server.url, terminal=True)
        assert ran.code == 0, ran.err
        assert [m["content"] for m in server.asked[2].body["messages"]] == ["three"]
    assert "HTTP 503: queue full" in ran.err
    assert "connection lost" in ran.err
    assert ran.out == "half\nyes\n\n"


def interrupt_after(text: str) -> None:
    """Interrupt the program, from another thread, once this stands on stdout."""
    main = threading.main_thread().ident
    assert main is not None

    def watch() -> None:
        patience = time.monotonic() + 20
        while text not in sys.stdout.getvalue() and time.monotonic() < patience:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=watch).start()


def test_ctrl_c_ends_the_answer_and_not_the_program(run, monkeypatch) -> None:
    """The server sees that the reader has gone, and the conversation goes on."""
    replies = iter([[*chunked(event(delta(content="half")))[:-1], 60.0], answer("yes")])

    def reply(_: object) -> list[object]:
        found = next(replies)
        if 60.0 in found:
            interrupt_after("half")
        return found

    typed(monkeypatch, "one", "two")
    with FakeServer(reply) as server:
        ran = run("chat", "--url", server.url, terminal=True)
        assert ran.code == 0, ran.err
        assert server.gone.wait(20)
        assert [m["content"] for m in server.asked[1].body["messages"]] == ["two"]
    assert ran.out == "half\nyes\n\n"
    assert "stopped; this turn is not kept" in ran.err


@pytest.mark.parametrize(
    "reply,code,message",
    [
        (whole({"error": {"message": "too long"}}, "400 Bad"), 2, "HTTP 400: too long"),
        (whole({"error": {"message": "dead"}}, "500 No"), 1, "HTTP 500: dead"),
        ([CLOSE], 1, "connection lost"),
    ],
)
def test_one_message_that_fails_is_an_error(run, reply, code: int, message: str) -> None:
    """2 for what was asked, 1 for what went wrong."""
    with FakeServer(lambda _: reply) as server:
        ran = run("chat", "--url", server.url, "Hi")
    assert (ran.code, ran.out) == (code, "")
    assert message in ran.err


@pytest.mark.parametrize(
    "argv,message",
    [
        (("--api-key", "x"), "add --url"),
        (("--extra-body", "{}"), "add --url"),
        (("--url", "URL", "--spec", "ngram"), "spec; the server has its own"),
        (("--url", "URL", "--max-len", "99", "--spec-nodes", "3"), "max_len"),
        (("--url", "URL", "--n", "2"), "--n cannot be asked"),
        (("--url", "URL", "--banned-token-ids", "2"), "--banned-token-ids cannot be asked"),
        (("--url", "localhost"), "http://HOST:PORT"),
        (("--url", "URL", "--extra-body", "x"), "JSON object"),
    ],
)
def test_options_that_have_no_meaning_are_refused(run, argv, message: str) -> None:
    """None is silently ignored."""
    with FakeServer() as server:
        ran = run("chat", "Hi", *(server.url if a == "URL" else a for a in argv))
        assert (ran.code, ran.out) == (2, "")
        assert message in ran.err
        assert server.asked == []
    assert ran.engines == []


def test_commands_are_not_sent_to_a_model_that_is_loaded_here(run, monkeypatch) -> None:
    """/help is for the program, in every talk."""
    typed(monkeypatch, "/help", "/nonsense", "the", "/quit", "and")
    ran = run("chat", terminal=True)
    assert ran.code == 0, ran.err
    assert len(ran.engines[0].added) == 1
    assert "/clear, /reset" in ran.err
    assert "no command /nonsense" in ran.err


SPELL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x00\x7f"


def bewitched(_: object) -> list[object]:
    return chunked(
        event(delta(reasoning_content=f"think{SPELL}")),
        event(delta(content=f"a\tb\r\nc{SPELL}")),
        event(delta(f"stop{SPELL}")),
        event("[DONE]"),
    )


def is_tame(text: str) -> bool:
    return not {c for c in text if ord(c) < 32 or 127 <= ord(c) < 160} - set("\n\t")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_server_gives_a_terminal_no_orders(run, monkeypatch, as_json: bool) -> None:
    """It could rename the window, or write what looks like somebody else's words."""
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")  # no colours of our own
    monkeypatch.setenv("NO_COLOR", "1")
    words = ("--json",) if as_json else ()
    with FakeServer(bewitched) as server:
        ran = run("chat", "--url", server.url, "Hi", "--stats", *words)
    assert ran.code == 0, ran.err
    assert is_tame(ran.out + ran.err)
    assert "]0;owned" in ran.out
    assert "finish stop\ufffd]0;owned" in ran.err
    if not as_json:
        assert ran.out.startswith("a\tb\nc\ufffd]0;owned\ufffd")
        assert "think\ufffd]0;owned" in ran.err
    with FakeServer(lambda _: whole({"error": {"message": f"no{SPELL}"}}, "400 Bad")) as server:
        ran = run("chat", "--url", server.url, "Hi")
    assert ran.code == 2
    assert "no\ufffd]0;owned" in ran.err
    assert is_tame(ran.err)


def test_a_pipe_gets_an_answer_as_it_is(run) -> None:
    """Programs want what the server said."""
    with FakeServer(bewitched) as server:
        ran = run("chat", "--url", server.url, "Hi")
    assert ran.out == f"a\tb\r\nc{SPELL}\n"
