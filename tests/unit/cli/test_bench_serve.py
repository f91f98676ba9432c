from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path

import pytest

from paceline.cli import bench_serve_words as words
from paceline.cli import main
from tests.fake_openai import FakeServer, answer, whole

ROWS = [
    {"question_id": i, "category": "qa" if i % 2 else "rag", "turns": [f"q{i}"]} for i in range(6)
]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return str(path)


def test_a_sweep_ends_with_its_record(run, prompts: str, tmp_path: Path) -> None:
    """Table on stderr, record as the last line of stdout and in the file; a result per load."""
    out = tmp_path / "records" / "sweep.json"
    told = {"num_spec_steps": 4, "num_draft_tokens": 9, "num_accepted_draft_tokens": 2}
    reply = answer("a", "b", tokens=7, metrics={"speculative_decoding": told})
    with FakeServer(lambda _: reply) as server:
        ran = run(
            *("bench", "serve", "--url", server.url, prompts, "--concurrency", "1,3"),
            *("--goodput", "ttft:60000,tpot:60000", "--save-detailed", "--out", str(out)),
        )
        assert ran.code == 0, ran.err
    record = json.loads(ran.out.splitlines()[-1])
    assert json.loads(out.read_text()) == record
    assert [r["max_concurrency"] for r in record["results"]] == [1, 3]
    assert [r["max_concurrent_requests"] for r in record["results"]] == [1, 3]
    for result in record["results"]:
        assert (result["completed"], result["failed"]) == (6, 0)
        assert result["total_output_tokens"] == 42
        assert result["output_lens"] == [7] * 6
        assert result["answers_acceptance_length"] == 1.5
        assert result["request_goodput"] == pytest.approx(result["request_throughput"], rel=1e-3)
        assert {g["group"] for g in result["groups"]} == {"qa", "rag"}
    assert [r["max_concurrency"] for r in record["summary"]] == [1, 3]
    assert "chunk gap" in ran.err
    assert "by the answers, 1 at a time" in ran.err
    assert "\x1b" not in ran.err
    assert ran.engines == []


@pytest.mark.parametrize("at_end", [True, False])
def test_limits_may_stand_apart_as_vllm_takes_them(run, prompts: str, *, at_end: bool) -> None:
    """`--goodput ttft:200 tpot:50`, before or after the file."""
    limits = ["--goodput", "ttft:60000", "tpot:60000", "e2e:0.001"]
    given = [prompts, *limits] if at_end else [*limits, prompts]
    with FakeServer(lambda _: answer("a")) as server:
        ran = run("bench", "serve", "--url", server.url, *given, "--num-prompts", "2")
    assert ran.code == 0, ran.err
    (result,) = json.loads(ran.out.splitlines()[-1])["results"]
    assert (result["completed"], result["request_goodput"]) == (2, 0)


def test_random_ids_go_to_completions_and_are_called_so(run) -> None:
    """Their acceptance means nothing, and the screen says it."""
    with FakeServer(lambda _: answer("a")) as server:
        ran = run(
            *("bench", "serve", "--url", server.url, "--random-input-len", "8"),
            *("--random-output-len", "4", "--num-prompts", "5", "--request-rate", "inf"),
        )
        assert ran.code == 0, ran.err
        assert {a.path for a in server.asked} == {"/v1/completions"}
        assert {len(a.body["prompt"]) for a in server.asked} == {8}
        assert all(a.body["ignore_eos"] and a.body["max_tokens"] == 4 for a in server.asked)
    assert "says nothing about text" in ran.err
    assert json.loads(ran.out)["settings"]["request_rate"] == ["inf"]


def test_completions_take_prompts_as_they_are(run, prompts: str) -> None:
    """No template: the text itself."""
    with FakeServer(lambda _: answer("a")) as server:
        ran = run("bench", "serve", "--url", server.url, prompts, "--endpoint", "completions")
        assert ran.code == 0, ran.err
        assert {a.body["prompt"] for a in server.asked} == {f"q{i}" for i in range(6)}


def test_failures_are_shown_by_kind(run, prompts: str) -> None:
    """With what the server says; the others are measured."""
    busy = whole({"error": {"message": "queue full"}}, "503 Busy")
    replies = iter([answer("a"), busy, busy, answer("a")])
    with FakeServer(lambda _: next(replies, answer("a"))) as server:
        ran = run("bench", "serve", "--url", server.url, prompts)
    assert ran.code == 0
    assert "2 failed, HTTP 503: queue full" in ran.err
    assert json.loads(ran.out)["results"][0]["completed"] == 4


def test_a_server_that_is_gone_is_a_failure(run, prompts: str) -> None:
    """Before the run: one message. During it: the record, and then the message."""
    with FakeServer() as server:
        url = server.url
    ran = run("bench", "serve", "--url", url, prompts)
    assert (ran.code, ran.out) == (1, "")
    assert "cannot connect" in ran.err
    with FakeServer(lambda _: whole({}, "500 No")) as server:
        ran = run("bench", "serve", "--url", server.url, prompts, "--warmup", "0")
    assert ran.code == 1
    assert "no request completed" in ran.err
    assert json.loads(ran.out)["results"][0]["failed"] == 6


def test_ctrl_c_keeps_the_runs_that_ended(run, prompts: str) -> None:
    """Hours of measuring are not thrown away; before the first run has ended there is nothing."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    left = iter(range(100))

    def reply(_: object) -> list[object]:
        if next(left) == stop_at:
            signal.pthread_kill(main_thread, signal.SIGINT)
            return [60.0]
        return answer("a")

    argv = (prompts, "--concurrency", "1,2,3", "--warmup", "0")
    stop_at = 9
    with FakeServer(reply) as server:
        ran = run("bench", "serve", "--url", server.url, *argv)
    assert ran.code == 130
    assert "interrupted: only the first 1 runs are here" in ran.err
    assert len(json.loads(ran.out)["results"]) == 1
    left, stop_at = iter(range(100)), 3
    with FakeServer(reply) as server:
        ran = run("bench", "serve", "--url", server.url, *argv)
    assert (ran.code, ran.out, ran.err) == (130, "", "paceline: interrupted\n")


def test_counters_that_contradict_each_other_fail_the_bench(run, prompts: str) -> None:
    """Accept length = 1 + sum of position rates is asserted."""
    asked: list[int] = []

    def page() -> list[object]:
        n = len(asked)
        return whole(
            f"vllm:spec_decode_num_drafts_total {4 * n}\n"
            f"vllm:spec_decode_num_accepted_tokens_total {3 * n}\n"
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {2 * n}\n'.encode()
        )

    def reply(_: object) -> list[object]:
        asked.append(1)
        return answer("a")

    with FakeServer(reply, pages={"/metrics": page}) as server:
        ran = run("bench", "serve", "--url", server.url, prompts)
    assert ran.code == 1
    assert "contradict each other: accept length is 1.7500" in ran.err
    assert json.loads(ran.out)["results"][0]["spec_decode_contradiction"]


def test_a_picture_holds_earlier_records_too(run, prompts: str, tmp_path: Path) -> None:
    """A server without drafts beside the same one with them."""
    pytest.importorskip("matplotlib")
    before, picture = tmp_path / "before.json", tmp_path / "sweep.svg"
    with FakeServer() as server:
        argv = ("bench", "serve", "--url", server.url, prompts)
        assert run(*argv, "--out", str(before)).code == 0
        ran = run(*argv, "--plot", str(picture), "--beside", str(before))
    assert ran.code == 0, ran.err
    text = picture.read_text(encoding="utf-8")
    assert "before" in text
    assert "this run" in text


def test_a_terminal_is_spared_the_record(run, prompts: str, monkeypatch) -> None:
    """As with the other benches; --json asks for it."""
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    with FakeServer() as server:
        assert run("bench", "serve", "--url", server.url, prompts).out == ""
        assert run("bench", "serve", "--url", server.url, prompts, "--json").out != ""


def test_the_key_is_sent_and_not_recorded(run, prompts: str, monkeypatch) -> None:
    """By flag or by the usual variable; a record is for everybody to read."""
    argv = ["bench", "serve", "--api-key", "sekret", "--api-key=sekret"]
    monkeypatch.setattr(sys, "argv", ["paceline", *argv])
    assert words.command_line() == ["paceline", *argv[:3], "...", "--api-key=..."]
    monkeypatch.setenv("OPENAI_API_KEY", "sekret")
    with FakeServer() as server:
        ran = run("bench", "serve", "--url", server.url, prompts)
        assert {a.headers["authorization"] for a in server.asked} == {"Bearer sekret"}
        assert "sekret" not in ran.out + ran.err


@pytest.mark.parametrize(
    "argv,message",
    [
        ((), "name one of the two"),
        (("PROMPTS", "--random-input-len", "5"), "name one of the two"),
        (("--random-input-len", "0"), "at least 1"),
        (("--random-input-len", "5", "--random-range-ratio", "1"), "below 1"),
        (("--random-input-len", "5", "--endpoint", "chat"), "chat template"),
        (("-",), "standard input"),
        (("PROMPTS", "--endpoint", "embeddings"), "chat and completions"),
        (("PROMPTS", "--concurrency", "1", "--request-rate", "2"), "leave one of them out"),
        (("PROMPTS", "--concurrency", "1,x"), "numbers above 0"),
        (("PROMPTS", "--concurrency", "1.5"), "numbers above 0"),
        (("PROMPTS", "--request-rate", "nan"), "numbers above 0"),
        (("PROMPTS", "--request-rate", "-1"), "numbers above 0"),
        (("PROMPTS", "--burstiness", "2"), "goes with --request-rate"),
        (("PROMPTS", "--goodput", "ttft"), "ttft:200,tpot:50"),
        (("PROMPTS", "--goodput", "itl:5"), "ttft:200,tpot:50"),
        (("PROMPTS", "--extra-body", "[]"), "no JSON object"),
        (("PROMPTS", "--extra-body", '{"n": 2}'), "sets 'n'"),
        (("PROMPTS", "--variant", "x"), "NAME=JSON"),
        (("PROMPTS", "--variant", "x={}", "--variant", "x={}"), "NAME=JSON"),
        (("PROMPTS", "--variant", 'x={"stream": false}'), "--variant x sets 'stream'"),
        (
            ("PROMPTS", "--max-tokens", "0", "--repeats", "0"),
            "--repeats is 0; at least 1 is possible; raise it",
        ),
        (
            ("PROMPTS", "--timeout", "0"),
            "--timeout is 0; more than 0 seconds are possible; raise it",
        ),
        (("PROMPTS", "--plot", "x.gif"), ".png, .svg, .pdf"),
        (("PROMPTS", "--beside", "x.json"), "add --plot"),
        (("PROMPTS", "--url", "localhost"), "http://HOST:PORT"),
    ],
)
def test_what_cannot_be_measured_is_refused_beforehand(
    run, prompts: str, argv: tuple[str, ...], message: str
) -> None:
    """Exit code 2 and what is possible, before a request is sent."""
    with FakeServer() as server:
        where = () if "--url" in argv else ("--url", server.url)
        ran = run("bench", "serve", *where, *(prompts if a == "PROMPTS" else a for a in argv))
        assert (ran.code, ran.out) == (2, "")
        assert message in ran.err
        assert server.asked == []


def test_help_has_examples(capsys) -> None:
    """As with the other commands."""
    assert main(["bench", "serve", "--help"]) == 0
    out = capsys.readouterr().out
    assert "Examples:" in out
    for flag in ("--url", "--concurrency", "--request-rate", "--goodput", "--variant", "--no-salt"):
        assert flag in out
