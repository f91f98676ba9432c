from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import pytest

from tests.unit.cli.conftest import TOKENIZER


def test_text_goes_to_stdout_and_nothing_else(run) -> None:
    """What is piped on is the answer; without a terminal there are no remarks and no colours."""
    ran = run("generate", "x")
    assert (ran.code, ran.out, ran.err) == (0, "the answer\n", "")


def test_remarks_can_be_asked_for(run) -> None:
    """--stats says how the answer was made, on stderr, in plain text where that is no terminal."""
    ran = run("generate", "x", "--stats", "--seed", "5")
    assert ran.out == "the answer\n"
    assert "accept length" in ran.err
    assert "seed 5" in ran.err
    assert "\x1b" not in ran.err


@pytest.mark.parametrize("argv", [("generate",), ("generate", "-")])
def test_the_prompt_may_stand_on_stdin(run, argv: tuple[str, ...]) -> None:
    """One line end at its end is the shell's, not the prompt's."""
    ran = run(*argv, stdin="the end\n\n")
    assert ran.code == 0
    assert list(ran.engines[0].added[0].prompt_ids) == TOKENIZER.encode("the end\n")


@pytest.mark.parametrize(
    "argv,stdin,terminal,message",
    [
        (("generate",), None, True, "no prompt: give one as an argument"),
        (("generate", ""), None, False, "the prompt is empty"),
        (("generate",), "\n", False, "the prompt is empty"),
        (("chat", ""), None, True, "the prompt is empty"),
    ],
)
def test_no_prompt_is_a_mistake(run, argv, stdin, terminal: bool, message: str) -> None:
    """Nothing to answer: said before a model is loaded."""
    ran = run(*argv, stdin=stdin, terminal=terminal)
    assert ran.code == 2
    assert message in ran.err
    assert ran.engines == []


def test_json_has_one_object_per_answer(run) -> None:
    """Everything about an answer, for programs; n answers are n lines."""
    ran = run("generate", "x", "--json", "--n", "2", "--logprobs", "1", "--seed", "9")
    assert ran.code == 0, ran.err
    rows = [json.loads(line) for line in ran.out.splitlines()]
    assert [r["sample_index"] for r in rows] == [0, 1]
    assert {r["seed"] for r in rows} == {9}
    assert rows[0]["text"] == "the answer"
    assert rows[0]["finish_reason"] == "stop"
    assert len(rows[0]["logprobs"]) == len(rows[0]["token_ids"])
    assert rows[0]["logprobs"][0]["top"][0]["token_id"] == rows[0]["token_ids"][0]
    assert rows[0]["accept_length"] > 1


def test_several_answers_are_told_apart(run) -> None:
    """N answers as text are numbered, in order."""
    assert run("generate", "x", "--n", "2").out == "--- 0\nthe answer\n--- 1\nthe answer\n"


def test_chat_uses_the_template(run) -> None:
    """One message, with a system message, through the model's chat template."""
    ran = run("chat", "the", "--system", "and")
    assert (ran.code, ran.out) == (0, "the answer\n")
    expected = TOKENIZER.encode_chat(
        [{"role": "system", "content": "and"}, {"role": "user", "content": "the"}]
    )
    assert list(ran.engines[0].added[0].prompt_ids) == expected


def test_a_talk_remembers_its_turns(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns go on until /exit; /reset forgets; what can't be served is said and not kept."""
    lines = iter(["the", "", "and", "/reset", "of" * 300, "of", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    ran = run("chat", terminal=True, max_len=120)
    assert ran.code == 0, ran.err
    texts = [TOKENIZER.decode(r.prompt_ids) for r in ran.engines[0].added]
    assert [t.count("user") for t in texts] == [1, 2, 1]
    assert "the answer" in texts[1]
    assert "the" not in texts[2]


def test_a_talk_ends_with_its_input(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-D at the prompt is a normal end."""

    def end(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert run("chat", terminal=True).code == 0


def _interrupt_after(text: str):
    """Interrupts the program once this text stands on stdout."""
    main = threading.main_thread().ident
    assert main is not None
    sent = threading.Event()

    def on_step(number: int) -> None:
        if number < 5 or sent.is_set():
            return
        patience = time.monotonic() + 20
        while text not in sys.stdout.getvalue() and time.monotonic() < patience:
            time.sleep(0.001)
        sent.set()
        signal.pthread_kill(main, signal.SIGINT)

    return on_step


def test_ctrl_c_keeps_what_was_said(run) -> None:
    """The text so far stays, on whole lines; the exit code is 130."""
    ran = run(
        "generate",
        "x",
        "--max-tokens",
        "100000",
        "--ignore-eos",
        on_step=_interrupt_after("the answer"),
    )
    assert ran.code == 130
    assert ran.out.startswith("the answer")
    assert ran.out.endswith("\n")
    assert ran.err == "paceline: interrupted\n"
    assert ran.engines[0].aborted == [ran.engines[0].added[0].id]


def test_ctrl_c_in_a_talk_stops_the_answer_only(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer can be cut short without losing the conversation."""
    lines = iter(["the", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    ran = run(
        *("chat", "--max-tokens", "100000", "--ignore-eos"),
        terminal=True,
        on_step=_interrupt_after("the answer"),
    )
    assert ran.code == 0
    assert "stopped; this turn is not kept" in ran.err


def test_a_reader_that_leaves_ends_the_answer(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`| head` is no error: the request is aborted, and nothing is printed about it."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        ran = run("generate", "x", "--max-tokens", "100000", "--ignore-eos")
        assert ran.code == 141
        assert ran.err == ""
        assert ran.engines[0].aborted


def test_an_answer_that_failed_is_a_failure(run) -> None:
    """A stop matcher that broke, say: the text stays, the exit code tells."""
    from dataclasses import replace

    from paceline.core.request import FinishReason
    from tests.fake_engine import FakeEngine

    advance = FakeEngine._advance

    def broken(self: FakeEngine, one):
        output = advance(self, one)
        if output.finish_reason is None:
            return output
        return replace(output, finish_reason=FinishReason.ERROR, error="the matcher broke")

    FakeEngine._advance = broken
    try:
        ran = run("generate", "x")
    finally:
        FakeEngine._advance = advance
    assert (ran.code, ran.out) == (1, "the answer\n")
    assert ran.err == "paceline: the matcher broke\n"
