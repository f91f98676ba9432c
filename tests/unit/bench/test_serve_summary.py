from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import serve_plot
from paceline.bench.serve_client import Answer, Failure, Speculation
from paceline.bench.serve_counters import Counters
from paceline.bench.serve_load import Load, Measured
from paceline.bench.serve_prompts import Call, RandomPrompts
from paceline.bench.serve_report import (
    INFLATES,
    RANDOM_IDS,
    broken,
    record,
    summaries,
    warnings_of,
)
from paceline.bench.serve_run import ServeReport, ServeRun, ServeSettings
from paceline.bench.serve_summary import summarise
from paceline.bench.serve_tables import (
    details,
    failure_lines,
    groups_table,
    latency_table,
    throughput_table,
)
from paceline.bench.workload import plain
from paceline.core.errors import ConfigError

GOOD = Answer(
    started=10.0,
    ttft=0.1,
    e2e=0.5,
    gaps=(0.1, 0.3),
    text="abc",
    prompt_tokens=7,
    cached_tokens=0,
    output_tokens=5,
    finish_reason="stop",
    speculation=Speculation(num_steps=2, num_drafted=8, num_accepted=3),
)
SLOW = replace(
    GOOD,
    started=10.5,
    ttft=0.3,
    e2e=2.3,
    gaps=(2.0,),
    output_tokens=11,
    speculation=Speculation(num_steps=8, num_drafted=8, num_accepted=2),
)
FAILED = Answer(started=11.0, failure=Failure(kind="HTTP 503", message="full"))
COUNTS = Counters(
    prefix="vllm:",
    num_drafts=10,
    num_draft_tokens=40,
    num_accepted_tokens=15,
    per_position={0: 10, 1: 5},
)
SETTINGS = ServeSettings(
    url="http://a",
    model=None,
    endpoint="chat",
    loads=(Load(concurrency=2),),
    num_prompts=4,
    max_tokens=16,
    temperature=0.0,
    seed=0,
    repeats=1,
    warmup=0,
    timeout=60.0,
    salt=True,
    extra={},
    variants={"": {}},
    goodput={},
)


def made(*answers: Answer, counters: Counters | None = None, **more: Any) -> ServeRun:
    measured = Measured(
        answers=answers,
        seconds=2.0,
        most_at_once=2,
        client_share=0.1,
        client_lag=(0.001,),
        sent_late=0.0,
    )
    given = {
        "variant": "",
        "load": Load(concurrency=2),
        "repeat": 0,
        "calls": [Call(key=str(i), group="ab"[i % 2], content={}) for i in range(len(answers))],
        "measured": measured,
        "counters": counters,
    }
    return ServeRun(**{**given, **more})


def report(*runs: ServeRun) -> ServeReport:
    return ServeReport(model="fake", server={"version": {"version": "1"}}, runs=runs)


def test_figures_stand_under_vllm_s_keys() -> None:
    """By hand: two answers of 5 and 11 tokens in two seconds, one failure."""
    got = summarise(made(GOOD, SLOW, FAILED, counters=COUNTS), {})
    assert (got["completed"], got["failed"], got["duration"]) == (2, 1, 2.0)
    assert (got["total_input_tokens"], got["total_output_tokens"]) == (14, 16)
    assert got["request_throughput"] == 1.0
    assert got["output_throughput"] == 8.0
    assert got["total_token_throughput"] == 15.0
    assert got["max_concurrency"] == 2
    assert got["request_rate"] == "inf"
    expected = {
        "mean_ttft_ms": 200,
        "median_ttft_ms": 200,
        "std_ttft_ms": 100,
        "p50_ttft_ms": 200,
        "p90_ttft_ms": 280,
        "p95_ttft_ms": 290,
        "p99_ttft_ms": 298,
        "mean_tpot_ms": 150,  # 400 / 4 and 2000 / 10
        "std_tpot_ms": 50,
        "mean_itl_ms": 800,
        "median_itl_ms": 300,
        "mean_e2el_ms": 1400,
    }
    assert {key: got[key] for key in expected} == pytest.approx(expected)
    assert got["spec_decode_acceptance_length"] == 2.5
    assert got["spec_decode_acceptance_rate"] == 37.5
    assert got["spec_decode_num_drafts"] == 10
    assert got["spec_decode_draft_tokens"] == 40
    assert got["spec_decode_accepted_tokens"] == 15
    assert got["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5]
    assert got["answers_acceptance_length"] == 1.5  # 1 + 5 / 10, all steps pooled
    assert got["answers_acceptance_length_mean"] == (2.5 + 1.25) / 2
    assert got["failures"] == {"HTTP 503": {"count": 1, "messages": ["full"]}}


def test_without_usage_there_are_no_token_figures() -> None:
    """They are null, not made of chunks; what can be measured is there."""
    bare = replace(GOOD, output_tokens=None, prompt_tokens=None, cached_tokens=None)
    got = summarise(made(bare, GOOD), {})
    assert got["total_output_tokens"] is None
    assert got["output_throughput"] is None
    assert got["total_token_throughput"] is None
    assert got["answers_without_usage"] == 1
    assert got["mean_tpot_ms"] == pytest.approx(100)
    assert got["mean_ttft_ms"] == pytest.approx(100)
    assert any(
        "without usage" in w for w in warnings_of(report(made(bare)), SETTINGS, plain("abcd"))
    )


def test_no_answers_give_nulls() -> None:
    """A record of a failed run is still a record: JSON has no NaN."""
    got = summarise(made(FAILED), {"ttft": 1.0})
    assert got["mean_ttft_ms"] is None
    assert got["p99_itl_ms"] is None
    assert got["request_goodput"] == 0.0
    json.dumps(got, allow_nan=False)


@pytest.mark.parametrize(
    "limits,good",
    [
        ({"ttft": 100.1}, 1),
        ({"ttft": 300.1}, 2),
        ({"ttft": 400, "tpot": 150}, 1),
        ({"e2el": 100}, 0),
    ],
)
def test_goodput_counts_requests_that_keep_every_limit(limits: Any, good: int) -> None:
    """A second, in two seconds; failures are never good."""
    assert summarise(made(GOOD, SLOW, FAILED), limits)["request_goodput"] == good / 2


def test_goodput_of_answers_without_a_time_per_token() -> None:
    """One token keeps any such limit; an unknown number of tokens keeps none."""
    single, unknown = replace(GOOD, output_tokens=1), replace(GOOD, output_tokens=None)
    limits = {"tpot": 1.0}
    assert summarise(made(single), limits)["request_goodput"] == 0.5
    assert summarise(made(unknown), limits)["request_goodput"] == 0.0


def test_details_are_those_of_every_request() -> None:
    """In order, failures included, so that lists belong together."""
    got = summarise(made(GOOD, FAILED, SLOW), {}, detailed=True)
    assert got["input_lens"] == [7, None, 7]
    assert got["output_lens"] == [5, None, 11]
    assert got["ttfts"] == [0.1, None, 0.3]
    assert got["itls"] == [[0.1, 0.3], [], [2.0]]
    assert got["start_times"] == [0.0, 1.0, 0.5]
    assert got["errors"] == ["", "HTTP 503: full", ""]
    assert "itls" not in summarise(made(GOOD), {})


def test_a_sweep_has_a_row_per_variant_and_load() -> None:
    """Medians over repeats, how far they lie apart, and the speed against the first variant."""
    loads = (Load(concurrency=1), Load(concurrency=2))
    settings = replace(SETTINGS, loads=loads, variants={"plain": {}, "drafts": {}}, repeats=2)
    fast = replace(GOOD, output_tokens=10)
    runs = [
        made(fast if v == "drafts" else GOOD, variant=v, load=load, repeat=r)
        for r in range(2)
        for load in loads
        for v in ("drafts", "plain")
    ]
    rows = summaries(report(*runs), settings)
    assert [(r["max_concurrency"], r["variant"]) for r in rows] == [
        (1, "plain"),
        (1, "drafts"),
        (2, "plain"),
        (2, "drafts"),
    ]
    assert [r["over_first_variant"] for r in rows] == [1.0, 2.0, 1.0, 2.0]
    assert {r["spread"] for r in rows} == {0.0}
    assert {r["repeats"] for r in rows} == {2}


def warned(*runs: ServeRun, **changes: Any) -> str:
    workload = changes.pop("workload", plain("abcd"))
    return "\n".join(warnings_of(report(*runs), replace(SETTINGS, **changes), workload))


def test_what_misleads_is_said() -> None:
    """Random ids, text after the end, prompts that come again, caches, few requests, slow clients."""
    assert warned(made(GOOD)) == ""
    assert RANDOM_IDS in warned(workload=RandomPrompts(input_len=4, output_len=4))
    assert INFLATES in warned(extra={"ignore_eos": True})
    assert INFLATES in warned(variants={"a": {"min_tokens": 3}})
    assert INFLATES not in warned(
        workload=RandomPrompts(input_len=4, output_len=4), extra={"ignore_eos": True}
    )
    assert "prompts come again: 9 requests from 4" in warned(num_prompts=9)
    assert "no cache_salt" in warned(made(GOOD), made(GOOD), salt=False)
    assert "few requests (3) for 2" in warned(num_prompts=3)
    assert "50% of the prompt tokens" in warned(
        made(replace(GOOD, prompt_tokens=8, cached_tokens=4))
    )
    assert "1.50 over all 10 steps of the answers, and 2.50 over the 10" in warned(
        made(GOOD, SLOW, counters=COUNTS)
    )
    assert warned(made(GOOD, counters=COUNTS)) == ""
    twice = replace(GOOD, output_tokens=10)
    assert "67% apart" in warned(made(GOOD), made(twice, repeat=1))
    busy = made(GOOD)
    busy = replace(busy, measured=replace(busy.measured, client_share=0.95))
    assert "its own delays" in warned(busy)
    assert "went back" in warned(made(GOOD, note="the counters went back"))


def test_a_bench_is_broken_by_silence_and_by_contradictions() -> None:
    """Both end it with an error after its record; failures of some requests don't."""
    assert broken(report(made(GOOD, FAILED, counters=COUNTS))) is None
    assert "no request completed" in (broken(report(made(GOOD), made(FAILED))) or "")
    wrong = replace(COUNTS, num_accepted_tokens=16)
    assert "contradict" in (broken(report(made(GOOD, counters=wrong))) or "")
    assert "contradict" in warned(made(GOOD, counters=wrong))


def test_a_record_is_json_and_holds_what_a_reader_needs() -> None:
    """Settings, what the server says of itself, conventions; vLLM's names in each result."""
    got = record(
        report(made(GOOD, counters=COUNTS, load=Load(rate=float("inf")))),
        replace(SETTINGS, loads=(Load(rate=float("inf")),)),
        plain(["a"]),
        command=["paceline"],
    )
    json.dumps(got, allow_nan=False)
    assert got["schema"] == "paceline-bench-serve/1"
    assert got["server"] == {"url": "http://a", "model": "fake", "version": {"version": "1"}}
    assert got["settings"]["request_rate"] == ["inf"]
    assert got["results"][0]["model_id"] == "fake"
    assert got["results"][0]["endpoint_type"] == "openai-chat"
    assert got["workload"]["num_prompts"] == 1


def shown(rendered: Any) -> str:
    import io

    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=200).print(rendered)
    return out.getvalue()


def test_tables_have_what_was_measured() -> None:
    """And a dash where nothing was."""
    run = made(GOOD, SLOW, FAILED, counters=COUNTS)
    rows = summaries(report(run), SETTINGS)
    assert "1.50" in shown(throughput_table(rows))
    assert "8.0" in shown(throughput_table(rows))
    assert "chunk gap" in shown(latency_table(rows))
    assert "200 / 298" in shown(latency_table(rows))
    text = shown(details(summarise(made(FAILED), {})))
    assert text.count("-") >= 4 * 6
    assert failure_lines([summarise(run, {}), summarise(run, {})]) == ["2 failed, HTTP 503: full"]
    groups = groups_table(report(run))
    assert groups is not None
    assert "2.50" in shown(groups)
    assert groups_table(report(made(replace(GOOD, speculation=None)))) is None


def test_records_become_one_picture(tmp_path: Path) -> None:
    """This run's lines and those of an earlier record."""
    pytest.importorskip("matplotlib")
    loads = (Load(concurrency=1), Load(concurrency=2))
    settings = replace(SETTINGS, loads=loads)
    runs = [made(GOOD, load=load) for load in loads]
    one = record(report(*runs), settings, plain(["a"]), command=[])
    path, kept = tmp_path / "a.svg", tmp_path / "before.json"
    kept.write_text(json.dumps(one), encoding="utf-8")
    serve_plot.draw({"before": serve_plot.read(kept), "this run": one}, path)
    assert path.read_text(encoding="utf-8").rstrip().endswith("</svg>")
    bare = made(replace(GOOD, output_tokens=None), load=loads[0])
    serve_plot.draw({"a": record(report(bare), settings, plain(["a"]), command=[])}, path)


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "paceline-bench/1"}'])
def test_a_file_that_is_no_such_record_is_refused(text: str, tmp_path: Path) -> None:
    """Before the run, and said what is taken."""
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="--out wrote"):
        serve_plot.read(path)
    with pytest.raises(ConfigError, match="--out wrote"):
        serve_plot.read(tmp_path / "none.json")
