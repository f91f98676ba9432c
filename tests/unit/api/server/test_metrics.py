"""/metrics: names that tools read, and figures that add up."""

from __future__ import annotations

import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.api.server.metrics import Metrics, accept_length, accepted_per_position
from paceline.api.server.settings import ServerSettings
from paceline.api.server.stage_clock import StageClock
from tests.local_server import PATH, LocalServer, body, local_server
from tests.served import ids

SPEC = {
    "spec_decode_num_drafts": 10.0,
    "spec_decode_num_draft_tokens": 40.0,
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
    with local_server(width=3, on_step=lambda _: time.sleep(0.005)) as found:
        yield found


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
    assert grown("inter_chunk_gap_seconds_count") >= 4
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
        place = f"{prefix}spec_decode_num_accepted_tokens_per_pos_total,position="
        assert [found[f"{place}{i}"] for i in (0, 1, 2, 3, 10)] == [9, 8, 0, 0, 1]
        assert found[f"{prefix}num_requests_running"] == 3
        assert found[f"{prefix}num_requests_waiting"] == 2
        assert found[f"{prefix}kv_cache_usage_perc"] == 0.25
        assert found[f"{prefix}num_preemptions_total"] == 1
        assert found[f"{prefix}prefix_cache_queries_total"] == 100
        assert found[f"{prefix}prefix_cache_hits_total"] == 64
    assert accept_length(report) == 3.5
    assert accept_length({}) is None
    assert accepted_per_position(report) == {0: 9.0, 1: 8.0, 10: 1.0}


def test_vllms_names_are_off_by_default() -> None:
    """Somebody else's prefix is used only where it was asked for."""
    assert "vllm:" not in Metrics("m").render(SPEC).decode()


def test_drafting_in_vain_is_told() -> None:
    """Judged over windows of row-steps, so that it comes and goes with the traffic."""
    metrics = Metrics("m")

    def vain(drafts: float, accepted: float) -> float:
        report = {
            "spec_decode_num_drafts": drafts,
            "spec_decode_num_accepted_tokens": accepted,
        }
        return samples(metrics.render(report).decode())["paceline:spec_decode_in_vain"]

    assert vain(0, 0) == 0
    assert vain(200, 0) == 0  # too few to say
    assert vain(300, 2) == 1
    assert vain(400, 90) == 1  # not a whole window yet
    assert vain(600, 200) == 0
    assert vain(900, 201) == 1


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
