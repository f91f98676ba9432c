"""/metrics: names that tools read, and figures that add up."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.api.results import Result
from paceline.api.server.engine_metrics import accept_length, accepted_per_position
from paceline.api.server.job import Job
from paceline.api.server.metrics import Metrics
from paceline.api.server.settings import ServerSettings
from paceline.api.server.stage_clock import StageClock
from paceline.core.batch import ForwardMode
from paceline.core.request import RequestStats, SamplingParams
from paceline.engine.counters import Counters
from paceline.engine.plan import Chunk, StepPlan
from tests import tiny
from tests.engine.as_on_gpu import as_on_gpu
from tests.engine.harness import engine, request, run
from tests.engine.test_beforehand import Sized
from tests.local_server import PATH, LocalServer, body, local_server
from tests.served import ids

SPEC = {
    "spec_decode_num_steps": 20.0,
    "spec_decode_num_drafts": 10.0,
    "spec_decode_num_draft_tokens": 40.0,
    "spec_decode_num_forced_tokens": 5.0,
    "spec_decode_num_accepted_tokens": 25.0,
    "spec_decode_num_accepted_tokens_per_pos_0": 9.0,
    "spec_decode_num_accepted_tokens_per_pos_1": 8.0,
    "spec_decode_num_accepted_tokens_per_pos_10": 1.0,
}


def samples(text: str) -> dict[str, float]:
    """Sample with its labels but the model's -> value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in {"engine", "model_name"}}
            key = sample.name + "".join(f",{k}={v}" for k, v in sorted(labels.items()))
            assert key not in found, f"{key} is told twice"
            found[key] = sample.value
    return found


@pytest.fixture
def server():
    """What a step makes has come to its reader before the next one begins: chunks are not joined."""
    made: list[LocalServer] = []

    def step(_: int) -> None:
        for _ in range(5):  # turns of the event loop: a chunk's way through it
            made[0].on_events(lambda: None)

    with local_server(width=3, on_step=step) as found:
        made.append(found)
        yield found


JOB = Job(prompts=[ids("the")], params=SamplingParams())


def answer(*, steps: int, accepted: int, forced: int = 0) -> Result:
    """A whole answer to `JOB` whose drafter proposed in so many steps."""
    stats = RequestStats(
        seed=1,
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_output_tokens=1 + accepted + steps,
        num_steps=steps + forced,
        num_drafted=3 * steps + forced,
        num_accepted=accepted,
        accept_histogram=(),
        num_preemptions=0,
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
        num_forced=forced,
        num_drafts=steps + forced,
        num_drafter_steps=steps,
    )
    return Result(
        prompt_index=0,
        sample_index=0,
        prompt_ids=JOB.prompts[0],
        text="",
        token_ids=(),
        finish_reason="stop",
        stop_reason=None,
        logprobs=None,
        sources=(),
        stats=stats,
    )


def scraped(server: LocalServer) -> dict[str, float]:
    with server.client() as client:
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(answer.text)


def test_what_requests_did_is_counted(server: LocalServer) -> None:
    """Tokens, ends, and one entry in each histogram per answer."""
    before = scraped(server)
    with server.client() as client:
        client.post(PATH, json=body(max_tokens=7))
        client.post(PATH, json=body(max_tokens=4, n=2, stream=True))
        client.post(PATH, json=body(max_tokens=50, stop=["d"]))
    server.settle()
    after = scraped(server)

    def grown(name: str) -> float:
        return after[f"paceline:{name}"] - before[f"paceline:{name}"]

    prompt = len(ids("the end"))
    assert grown("request_success_total,finished_reason=length") == 3
    assert grown("request_success_total,finished_reason=stop") == 1
    assert grown("generation_tokens_total") == 7 + 2 * 4 + 4
    assert grown("prompt_tokens_total") == 4 * prompt
    for name in (
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_max_tokens",
        "request_params_n",
        "request_accept_length",
    ):
        assert grown(f"{name}_count") == 4, name
    assert grown("request_generation_tokens_sum") == 19
    assert grown("request_prompt_tokens_sum") == 4 * prompt
    assert grown("inter_chunk_gap_seconds_count") == 2 + 2 * 1 + 1
    assert grown("time_to_first_token_seconds_bucket,le=+Inf") == 4


def test_vllms_names_say_the_same(server: LocalServer) -> None:
    """Tools that read `vllm:` find what vLLM has, with the same values; nothing else is there."""
    with server.client() as client:
        client.post(PATH, json=body())
    server.settle()
    found = scraped(server)
    theirs = {k.removeprefix("vllm:"): v for k, v in found.items() if k.startswith("vllm:")}
    ours = {k.removeprefix("paceline:"): v for k, v in found.items() if k.startswith("paceline:")}
    for name in ("request_success_total,finished_reason=length", "generation_tokens_total"):
        assert theirs[name] == ours[name] > 0
    gaps = "inter_token_latency_seconds_count"
    assert theirs[gaps] == ours["inter_chunk_gap_seconds_count"]
    assert "inter_chunk_gap_seconds_count" not in theirs
    assert not any(name.startswith("step_stage") for name in theirs)


def test_the_engines_counters_have_vllms_suffixes() -> None:
    """The four that four tools read by name; positions from the first, also those without an accept."""
    metrics = Metrics("m", num_positions=4, vllm_names=True)
    report = {**SPEC, "num_running": 3.0, "num_waiting": 2.0, "kv_cache_usage": 0.25}
    report |= {"num_preemptions": 1.0, "prefix_cache_queries": 100.0, "prefix_cache_hits": 64.0}
    found = samples(metrics.render(report).decode())
    for prefix in ("paceline:", "vllm:"):
        assert found[f"{prefix}spec_decode_num_drafts_total"] == 10
        assert found[f"{prefix}spec_decode_num_draft_tokens_total"] == 40
        assert found[f"{prefix}spec_decode_num_accepted_tokens_total"] == 25
        ours = prefix == "paceline:"  # vLLM knows neither of these
        assert found.get(f"{prefix}spec_decode_num_forced_tokens_total") == (5 if ours else None)
        assert found.get(f"{prefix}spec_decode_num_steps_total") == (20 if ours else None)
        place = f"{prefix}spec_decode_num_accepted_tokens_per_pos_total,position="
        assert [found[f"{place}{i}"] for i in (0, 1, 2, 3, 10)] == [9, 8, 0, 0, 1]
        assert found[f"{prefix}num_requests_running"] == 3
        assert found[f"{prefix}num_requests_waiting"] == 2
        assert found[f"{prefix}kv_cache_usage_perc"] == 0.25
        assert found[f"{prefix}num_preemptions_total"] == 1
        assert found[f"{prefix}prefix_cache_queries_total"] == 100
        assert found[f"{prefix}prefix_cache_hits_total"] == 64
    assert accept_length(report) == 2.25, "over all steps, as answers tell it"
    assert accept_length({}) is None
    assert accepted_per_position(report) == {0: 9.0, 1: 8.0, 10: 1.0}


def test_vllms_names_are_off_by_default() -> None:
    """Somebody else's prefix is used only where it was asked for."""
    assert "vllm:" not in Metrics("m").render(SPEC).decode()


def test_the_steps_tokens_are_a_histogram() -> None:
    """vLLM's `iteration_tokens_total`, from an engine's own counters: two prompts, then steps of few."""
    counters, metrics = Counters(), Metrics("m", vllm_names=True)
    prompts = [Chunk(sequence=Mock(), start=0, count=n, final=True, picks=True) for n in (9, 30)]
    counters.record_pass(StepPlan(mode=ForwardMode.EXTEND, chunks=tuple(prompts)), 2)
    for emitted in (0, 1, 2, 8, 9):
        counters.record_pass(StepPlan(mode=ForwardMode.BLOCK), emitted)
    counters.record_pass(StepPlan(mode=ForwardMode.BLOCK), 20_000)
    found = samples(metrics.render(counters.as_dict()).decode())
    for name in ("paceline:iteration_tokens_total", "vllm:iteration_tokens_total"):
        upto = [
            found[f"{name}_bucket,le={end}"] for end in ("1.0", "8.0", "16.0", "64.0", "16384.0")
        ]
        assert upto == [2, 4, 5, 6, 6]
        assert found[f"{name}_bucket,le=+Inf"] == found[f"{name}_count"] == 7
        assert found[f"{name}_sum"] == 39 + 2 + 20 + 20_000


def test_steps_without_a_graph_are_told(tmp_path: Path) -> None:
    """An engine with graphs, of which one found memory; and one without a GPU, which needs none."""
    model = tiny.write_tiny(tmp_path, "qwen3", seed=5, num_hidden_layers=1)
    metrics, names = Metrics("m", vllm_names=True), Counter[str]()
    for room, eng in ((1, engine(model, method="none")), (0, engine(model, method="none"))):
        if room:
            as_on_gpu(eng, Sized(nbytes=1000, room=1000))
        for i, temperature in enumerate((0.0, 1.0)):  # two kinds of steps
            params = SamplingParams(temperature=temperature, max_tokens=5, ignore_eos=True)
            run(eng, [request(str(i), [5, 6], params)])
        report = eng.report()
        found = samples(metrics.render(report).decode())
        steps = report["num_block_steps"] // 2  # every second one
        assert steps > 1
        assert found["paceline:num_steps_without_graph_total"] == steps * room
        assert found["paceline:num_graphs"] == room
        assert found["paceline:graph_bytes"] == 1000 * room
        names.update(name for name in found if "graph" in name)
    assert len(names) == 3, "vLLM has none of these"


def test_drafting_in_vain_is_told() -> None:
    """Judged as answers end, over windows of row-steps, so that it comes and goes with the traffic."""
    metrics = Metrics("m")

    def vain(steps: int, accepted: int, forced: int = 0) -> float:
        metrics.ended(answer(steps=steps, accepted=accepted + forced, forced=forced), JOB, 1.0)
        return samples(metrics.render({}).decode())["paceline:spec_decode_in_vain"]

    assert vain(200, 0) == 0  # too few to say
    assert vain(56, 2) == 1
    assert vain(200, 90) == 1  # not a whole window yet
    assert vain(100, 20) == 0
    assert vain(300, 1) == 1
    assert vain(300, 100) == 0
    assert vain(300, 0, forced=5_000) == 1, "what a grammar forces is no merit of the drafter"
    assert vain(0, 0, forced=5_000) == 1, "and says nothing against the verdict"
    assert vain(300, 100, forced=5_000) == 0


def test_in_vain_is_judged_though_nobody_looks() -> None:
    """A bad hour ends with its answers, not with the next scrape, which would average over it."""
    metrics = Metrics("m")
    for _ in range(10):
        metrics.ended(answer(steps=300, accepted=200), JOB, 1.0)
    metrics.ended(answer(steps=300, accepted=0), JOB, 1.0)
    assert samples(metrics.render({}).decode())["paceline:spec_decode_in_vain"] == 1


def test_metrics_of_two_apps_are_two() -> None:
    """No registry is shared."""
    one, two = Metrics("one"), Metrics("two")
    one.refused("queue_full")
    assert samples(one.render({}).decode())["paceline:admission_rejections_total,reason=queue_full"]
    refused = samples(two.render({}).decode())
    assert refused["paceline:admission_rejections_total,reason=queue_full"] == 0


def test_the_parts_of_a_step_are_timed_from_another_thread() -> None:
    """Each part has its histogram; a part may lie within another."""
    metrics, clock = Metrics("m"), StageClock()
    with clock("unheard"):
        pass
    clock.tell = metrics.observe_stage

    def step() -> None:
        for _ in range(3):
            with clock("verify"), clock("walk"):
                pass

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    found = samples(metrics.render({}).decode())
    assert found["paceline:step_stage_seconds_count,stage=verify"] == 3
    assert found["paceline:step_stage_seconds_count,stage=walk"] == 3
    walk = found["paceline:step_stage_seconds_sum,stage=walk"]
    assert 0 < walk <= found["paceline:step_stage_seconds_sum,stage=verify"]
    assert "paceline:step_stage_seconds_count,stage=unheard" not in found


def test_names_of_models_are_labels_whatever_they_hold() -> None:
    """Quotes and line ends do not break the format."""
    text = Metrics('a "quoted"\nname\\').render(SPEC).decode()
    (family,) = [
        f
        for f in text_string_to_metric_families(text)
        if f.name == "paceline:spec_decode_num_drafts"
    ]
    assert family.samples[0].labels["model_name"] == 'a "quoted"\nname\\'


def test_server_info_tells_what_is_served_and_no_secret() -> None:
    """The resolved speculation and how well it does; no keys, no places of files."""
    settings = ServerSettings(
        served_model_name=("tiny",),
        api_key=("hush",),
        api_key_file=None,
        port_file="/some/where",
        chat_template="/some/where",
        uds="/some/where",
    )
    with local_server(settings=settings) as server, server.client() as client:
        answer = client.get("/server_info")
        told = answer.json()
    assert told["drafter"]["name"] == "fake"
    assert told["speculative_config"]["num_speculative_tokens"] == 16
    assert told["accept_length"] is None
    assert told["max_model_len"] == 200
    assert told["settings"]["max_queued_requests"] == 256
    assert "hush" not in answer.text
    assert "/some/where" not in answer.text
