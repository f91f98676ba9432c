"""What answers say of their speculation: as the server is told to, and the same that its metrics say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.api.llm import LLM
from paceline.api.results import Result
from paceline.api.server.accounting import figures_of
from paceline.api.server.context import context_of
from paceline.api.server.engine_metrics import accept_length
from paceline.api.server.job import Job
from paceline.api.server.metrics import Metrics
from paceline.api.server.protocol_answers import SpeculationFigures
from paceline.api.server.service import Service
from paceline.api.server.settings import ServerSettings
from paceline.core.request import SamplingParams
from tests import grammars, tiny
from tests.engine.harness import engine
from tests.local_server import local_server
from tests.tiny_drafters import write_dflash
from tests.unit.api.server.test_metrics import samples

BODIES: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"prompt": "the end", "max_tokens": 10},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10},
    "/v1/responses": {"input": "hi", "max_output_tokens": 10},
}
LISTS = {"per_step_accepted", "per_step_drafted"}


def settings(level: str) -> ServerSettings:
    return ServerSettings(served_model_name=("tiny",), per_request_spec_decode_metrics=level)


def told(level: str, path: str, **fields: object) -> list[dict[str, Any]]:
    """Every `metrics` of an answer, whether it comes as a whole or as a stream."""
    with local_server(settings=settings(level), width=4) as server, server.client() as client:
        answer = client.post(path, json={**BODIES[path], **fields})
        asked = [request.lists_steps for request in server.engine.added]
    assert answer.status_code == 200, answer.text
    assert asked == [level == "detailed" and "n" not in fields] * len(asked)
    if not fields.get("stream"):
        whole = [answer.json()]
    else:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
        whole = [json.loads(line) for line in lines if line.startswith("{")]
        whole = [event.get("response", event) for event in whole]
    return [event["metrics"] for event in whole if "metrics" in event]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(BODIES))
def test_steps_come_with_detailed_alone(path: str, stream: bool) -> None:
    """vLLM's flag: none, summary, or each step's counts beside it."""
    (none,) = told("none", path, stream=stream)
    assert "speculative_decoding" not in none
    (summary,) = (found["speculative_decoding"] for found in told("summary", path, stream=stream))
    (detailed,) = (found["speculative_decoding"] for found in told("detailed", path, stream=stream))
    assert not LISTS & set(summary)
    assert set(detailed) - set(summary) == LISTS
    assert detailed["per_step_accepted"] == detailed["per_step_drafted"] == [3, 3, 0]
    assert detailed["num_spec_steps"] == 3
    assert detailed["num_drafts"] == 2
    assert len(detailed["acceptance_histogram"]) == detailed["num_spec_tokens"] + 1


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_have_none(stream: bool) -> None:
    """Nobody is told their steps, so nobody keeps them."""
    assert not told("detailed", "/v1/completions", n=2, stream=stream)


@pytest.mark.parametrize("pattern", [None, "form"])
@pytest.mark.parametrize("method", ["suffix", "ddtree", "none"])
def test_answers_and_metrics_agree(tmp_path: Path, method: str, pattern: str | None) -> None:
    """An engine's own figures: on /metrics 1 + accepted / steps is what the answers' lengths mean."""
    model = tiny.write_tiny(tmp_path / "model", seed=2)
    network = {"model": str(write_dflash(tmp_path / "net", model))} if method == "ddtree" else {}
    llm = LLM.from_engine(engine(model, method=method, **network), grammars.tokenizer())
    own = settings("detailed")
    metrics = Metrics("tiny", num_positions=llm.spec.max_depth)
    constraint = None if pattern is None else grammars.constraint(pattern)
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=30, ignore_eos=pattern is None)
    prompts = ([11, 12, 13, 11, 12, 14, 11, 12], [31, 7, 7, 7, 9, 31, 7])

    async def main() -> tuple[list[Result], dict[str, float]]:
        service = Service(llm, own, listener=metrics)
        results = []
        for prompt in prompts:
            job = Job(prompts=[prompt], params=params, constraint=constraint)
            async with service.run(job) as stream:
                results += [c.result async for c in stream if c.result is not None]
        return results, await service.report()

    try:
        results, report = asyncio.run(main())
        context = context_of(llm, own, created=1, version="1")
    finally:
        llm.close()
    found = samples(metrics.render(report).decode())
    figures = [figures_of([one], context)["metrics"].get("speculative_decoding") for one in results]
    told = [one for one in figures if one is not None]
    assert [SpeculationFigures.model_validate(one).model_dump() for one in told] == told
    if method == "none":
        assert figures == [None, None]
        assert accept_length(report) == 1.0
        return

    def total(key: str) -> int:
        return sum(one[key] for one in figures)

    def counted(name: str) -> float:
        return found[f"paceline:spec_decode_{name}_total"]

    assert counted("num_steps") == total("num_spec_steps") > 0
    assert counted("num_drafts") == total("num_drafts")
    assert counted("num_draft_tokens") == total("num_draft_tokens")
    assert counted("num_accepted_tokens") == total("num_accepted_draft_tokens")
    assert counted("num_forced_tokens") == total("num_forced_tokens")
    for one in figures:
        assert sum(one["per_step_accepted"]) == one["num_accepted_draft_tokens"]
        assert sum(one["per_step_drafted"]) == one["num_draft_tokens"]
        assert len(one["per_step_drafted"]) == one["num_spec_steps"]
        assert sum(count > 0 for count in one["per_step_drafted"]) == one["num_drafts"]
        for j, count in enumerate(one["acceptance_histogram"]):
            assert one["per_step_accepted"].count(j) == count
    lengths = sum(one["mean_acceptance_length"] * one["num_spec_steps"] for one in figures)
    length = 1 + counted("num_accepted_tokens") / counted("num_steps")
    assert length == pytest.approx(lengths / total("num_spec_steps"))
    assert length == accept_length(report)
    places = [v for k, v in found.items() if "paceline:" in k and "per_pos_total" in k]
    assert sum(places) == counted("num_accepted_tokens")
