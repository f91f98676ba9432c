"""Whole runs against a server on a real socket."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.serve_load import Load
from paceline.bench.serve_prompts import (
    ABOVE_IDS,
    LOWEST_ID,
    RandomPrompts,
    bodies,
    calls_of,
    check_extra,
    chosen,
)
from paceline.bench.serve_run import ServeReport, ServeSettings, run
from paceline.bench.workload import Prompt, Workload, load, plain
from paceline.core.errors import ConfigError, PacelineError
from tests.fake_openai import CLOSE, FakeServer, answer, whole
from tests.unit.bench.test_serve_summary import SETTINGS


class Counting:
    """A server whose counters go up by what it answers, a moment after the answer."""

    def __init__(self) -> None:
        self.steps = self.pages = 0

    def reply(self, _: Any) -> list[Any]:
        self.steps += 10
        return answer("a", "b", tokens=16)

    def page(self) -> list[Any]:
        self.pages += 1
        steps = self.steps
        text = (
            f"paceline:spec_decode_num_drafts_total {steps}\n"
            f"paceline:spec_decode_num_draft_tokens_total {4 * steps}\n"
            f"paceline:spec_decode_num_accepted_tokens_total {steps // 2}\n"
            f'paceline:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {steps // 2}\n'
        )
        return whole(text.encode(), kind="text/plain")


def measure(server: FakeServer, **changes: Any) -> ServeReport:
    settings: ServeSettings = replace(SETTINGS, url=server.url, **changes)
    workload = plain("abcdef")
    return run(settings, lambda _, num: calls_of(workload, num))


def test_a_run_asks_as_it_is_told() -> None:
    """Model from the server, sampling, usage asked for, a seed of each request's own, a key."""
    with FakeServer() as server:
        settings = replace(SETTINGS, url=server.url, temperature=0.5, seed=7, extra={"top_k": 4})
        told: list[tuple[int, int]] = []
        run(
            settings,
            lambda _, num: calls_of(plain("abcdef"), num),
            api_key="sekret",
            progress=lambda done, total: told.append((done, total)),
        )
        assert told == [(n, 4) for n in range(5)]
        assert {a.path for a in server.asked} == {"/v1/chat/completions"}
        assert {a.headers["authorization"] for a in server.asked} == {"Bearer sekret"}
        seen = sorted((a.body for a in server.asked), key=lambda body: body["seed"])
        assert [b.pop("seed") for b in seen] == [7, 8, 9, 10]
        assert [b.pop("messages") for b in seen] == [
            [{"role": "user", "content": c}] for c in "abcd"
        ]
        (salt,) = {b.pop("cache_salt") for b in seen}
        assert salt
        assert seen[0] == {
            "model": "fake",
            "max_tokens": 16,
            "temperature": 0.5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "top_k": 4,
        }


def test_variants_loads_and_repeats_take_turns() -> None:
    """Every combination, who goes first changes, each run with a salt of its own."""
    loads = (Load(concurrency=1), Load(concurrency=3))
    variants = {"plain": {"speculative": {"enabled": False}}, "drafts": {}}
    with FakeServer() as server:
        got = measure(server, loads=loads, repeats=2, variants=variants, num_prompts=3, warmup=1)
        assert [(r.variant, r.load.concurrency, r.repeat) for r in got.runs] == [
            ("plain", 1, 0),
            ("drafts", 1, 0),
            ("drafts", 3, 0),
            ("plain", 3, 0),
            ("plain", 1, 1),
            ("drafts", 1, 1),
            ("drafts", 3, 1),
            ("plain", 3, 1),
        ]
        salts = [a.body["cache_salt"] for a in server.asked]
        assert len(set(salts)) == 16  # runs and their warm-ups
        assert sum("speculative" in a.body for a in server.asked) == 4 * 4
        assert all(len(r.measured.answers) == 3 for r in got.runs)
    with FakeServer() as server:
        measure(server, salt=False)
        assert not any("cache_salt" in a.body for a in server.asked)


def test_warm_up_is_asked_and_not_counted() -> None:
    """Other prompts than those that are counted, where there are any."""
    counting = Counting()
    with FakeServer(counting.reply, pages={"/metrics": counting.page}) as server:
        (got,) = measure(server, warmup=2).runs
        texts = [a.body["messages"][0]["content"] for a in server.asked]
        assert sorted(texts[:2]) == ["e", "f"]
        assert sorted(texts[2:]) == ["a", "b", "c", "d"]
        assert len(got.measured.answers) == 4
        assert got.counters is not None
        assert got.counters.num_drafts == 40
        assert got.counters.accept_length == 1.5
        assert counting.pages >= 3  # before, after, and once more to see that nothing moves


@pytest.mark.parametrize("page", [None, whole(b"# nothing\n"), [CLOSE], whole(b"no", "403 No")])
def test_a_server_without_counters_is_measured_all_the_same(page: Any) -> None:
    """Acceptance is left out."""
    pages = {} if page is None else {"/metrics": lambda: page}
    with FakeServer(pages=pages) as server:
        (got,) = measure(server).runs
        assert got.counters is None or got.counters.num_drafts == 0
        assert got.note is None
        assert all(a.failure is None for a in got.measured.answers)


def test_counters_that_went_back_are_no_figures() -> None:
    """A server that was started anew has forgotten what came before."""
    values = iter([90, 10, 10, 10])

    def page() -> list[Any]:
        return whole(b"paceline:spec_decode_num_drafts_total %d\n" % next(values, 10))

    with FakeServer(pages={"/metrics": page}) as server:
        (got,) = measure(server).runs
        assert got.counters is None
        assert "went back" in (got.note or "")


def test_a_server_that_answers_nothing_is_told_before_the_run() -> None:
    """With what it says, and what might help."""
    refuses = whole({"error": {"message": "unknown field cache_salt"}}, "400 Bad Request")
    with FakeServer(lambda _: refuses) as server:
        with pytest.raises(PacelineError, match=r"HTTP 400: unknown field.*--no-salt"):
            measure(server, warmup=2)
        assert len(server.asked) == 2
        assert len(measure(server, repeats=3).runs) == 1, "no use in going on"


def test_what_the_server_tells_about_itself_is_kept() -> None:
    """Version and configuration belong to a record; a page that is none is left out."""
    pages = {
        "/version": lambda: whole({"version": "9"}),
        "/server_info": lambda: whole(b"<html>"),
    }
    with FakeServer(pages=pages) as server:
        got = measure(server)
        assert got.server == {"version": {"version": "9"}}
        assert got.model == "fake"
    with FakeServer(pages={"/v1/models": lambda: [CLOSE]}) as server:
        assert measure(server, model="mine").model == "mine"
        assert server.asked[0].body["model"] == "mine"


def test_random_prompts_have_their_lengths() -> None:
    """Ids of ordinary tokens, lengths within the ratio, the same for the same seed."""
    prompts = RandomPrompts(input_len=20, output_len=10, range_ratio=0.5)
    calls = prompts.calls(200, seed=1)
    lengths = {len(c.content["prompt"]) for c in calls}
    assert (min(lengths), max(lengths)) == (10, 30)
    assert {c.content["max_tokens"] for c in calls} == set(range(5, 16))
    assert all(LOWEST_ID <= i < ABOVE_IDS for c in calls for i in c.content["prompt"])
    assert calls == prompts.calls(200, seed=1)
    assert calls != prompts.calls(200, seed=2)
    fixed = RandomPrompts(input_len=3, output_len=1).calls(5, seed=0)
    assert {(len(c.content["prompt"]), c.content["max_tokens"]) for c in fixed} == {(3, 1)}


def workload(**groups: int) -> Workload:
    prompts = [
        Prompt(key=f"{g}/{i}", group=g, category=g, messages=({"role": "user", "content": g},))
        for g, n in groups.items()
        for i in range(n)
    ]
    return Workload(prompts=tuple(prompts), sources=())


def test_prompts_are_mixed_and_their_groups_take_turns() -> None:
    """So that a part of them is like the whole; a smaller number is the beginning of a larger one."""
    given = workload(a=10, b=10, c=2)
    six = chosen(given, 6, seed=0).prompts
    assert [p.group for p in six] == ["a", "b", "c"] * 2
    every = chosen(given, 100, seed=0).prompts
    assert every[:6] == six
    assert {p.key for p in every} == {p.key for p in given.prompts}
    assert chosen(given, 100, seed=1).prompts != every


def test_a_group_of_many_categories_gets_no_more_than_its_turn() -> None:
    """Spec-Bench's mt_bench has eight of thirteen categories, and a sixth of the prompts."""
    given = Workload(
        prompts=tuple(
            Prompt(key=f"{group}/{category}/{i}", group=group, category=category, text="a")
            for group, categories in (("many", "abcdefgh"), ("one", "x"), ("two", "yz"))
            for category in categories
            for i in range(6)
        ),
        sources=(),
    )
    found = chosen(given, 12, seed=0).prompts
    assert [p.group for p in found] == ["many", "one", "two"] * 4
    assert len({p.category for p in found if p.group == "many"}) == 4
    assert [p.category for p in found if p.group == "two"][:2] in (["y", "z"], ["z", "y"])


def test_speed_bench_s_shape_is_read(tmp_path: Path) -> None:
    """question_id, category, messages: system and first user message."""
    path = tmp_path / "speed.jsonl"
    path.write_text(
        '{"question_id": 7, "category": "coding", "messages": [{"role": "system", "content": "s"}, '
        '{"role": "user", "content": "u"}, {"role": "assistant", "content": "x"}]}\n'
    )
    (call,) = calls_of(load([path]), 1)
    assert (call.key, call.group) == ("speed/7", "coding")
    assert call.content == {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    }


def test_null_takes_a_key_out() -> None:
    """Some servers know max_completion_tokens only."""
    (body,) = bodies(
        calls_of(plain(["é"]), 1),
        model="m",
        endpoint="chat",
        max_tokens=5,
        temperature=0.0,
        seed=0,
        extra={"max_tokens": None, "max_completion_tokens": 5},
    )
    import json

    sent = json.loads(body)
    assert "max_tokens" not in sent
    assert sent["max_completion_tokens"] == 5
    assert "é".encode() in body


@pytest.mark.parametrize("key", ["stream", "n", "messages", "prompt", "stream_options", "best_of"])
def test_what_the_measurement_sets_is_not_to_be_set(key: str) -> None:
    """It would measure something else."""
    with pytest.raises(ConfigError, match=f"--extra-body sets '{key}'"):
        check_extra({key: 1}, "--extra-body")
