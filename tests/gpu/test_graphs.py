"""Whole steps as graphs on a CUDA device: every step has one, and none changes a token or leaks a page."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.request import FinishReason, SamplingParams
from paceline.engine.engine import Engine
from tests import network_cases, tiny, tiny_drafters
from tests.engine.harness import engine, request, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LISTS: list[tuple[str, dict[str, Any]]] = [("none", {}), ("ngram", {}), ("suffix", {})]
CASES = [*LISTS, *network_cases.network_cases()]
IDS = [network_cases.case_id(name, own) for name, own in CASES]
KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 9, "frequency_penalty": 0.5},
    {"temperature": 1.0, "min_p": 0.05, "logit_bias": {12: 1.5}},
    {"temperature": 0.0, "min_tokens": 6},
]
MANY = 40


def jobs(rng: random.Random) -> list[tuple[str, list[int], SamplingParams]]:
    """Requests of all kinds, with prompts that repeat themselves."""
    made = []
    for i in range(MANY):
        base = [rng.randrange(3, 12) for _ in range(rng.randrange(1, 6))]
        prompt = (base * 9)[: rng.randrange(1, 40)]
        params = SamplingParams(
            max_tokens=rng.randrange(6, 30), seed=rng.randrange(5), **rng.choice(KINDS)
        )
        made.append((f"r{i}", prompt, params))
    return made


def live(eng: Engine, rng: random.Random) -> dict[str, list[int]]:
    """Send waves of requests, some of which are aborted; what the finished ones said."""
    got: dict[str, list[int]] = {}
    finished: dict[str, list[int]] = {}
    todo = jobs(rng)
    still: list[str] = []
    while todo or eng.has_work:
        for _ in range(min(len(todo), rng.choice([0, 0, 1, 3, 9]))):
            name, prompt, params = todo.pop()
            got[name] = []
            eng.add(request(name, prompt, params))
            still.append(name)
        if still and rng.random() < 0.04:
            eng.abort(rng.choice(still))
        for out in eng.step():
            got[out.request_id] += out.token_ids
            if out.finish_reason is not None:
                still.remove(out.request_id)
                if out.finish_reason is not FinishReason.ABORT:
                    finished[out.request_id] = got[out.request_id]
        eng.check_integrity()
    return finished


@pytest.mark.parametrize("method, own", CASES, ids=IDS)
def test_a_sweep_of_concurrency(tmp_path: Path, method: str, own: Mapping[str, Any]) -> None:
    """1 to 17 rows, padded to six sizes; joins, leaves, aborts and preemptions: the CPU's tokens."""
    base = tiny.write_tiny(tmp_path / "target", "qwen3", seed=5)
    wanted = jobs(random.Random(3))
    plain = engine(base, method="none", max_len=72)
    expected = {
        n: run(plain, [request(n, prompt, params)])[n].tokens for n, prompt, params in wanted
    }
    draft: dict[str, Any] = {"method": method, **own}
    if method not in dict(LISTS):
        texts = [[*prompt, *expected[n]] for n, prompt, _ in wanted]
        build = tiny_drafters.BUILDERS[network_cases.network_in(method, own)]
        draft["model"] = str(build(tmp_path / "drafter", base, texts[:12], steps=60))
    eng = engine(base, Engine.build, device="cuda", max_rows=17, max_len=72, num_pages=120, **draft)
    for round_ in range(2):  # the second finds its graphs made
        finished = live(eng, random.Random(3 + 10 * round_))
        if round_ == 0:
            assert {n: expected[n] for n in finished} == finished
        assert len(finished) > MANY // 2
    report = eng.report()
    assert report["num_steps_without_graph"] == 0
    assert report["num_graphs"] > 3
    assert eng.num_running == eng.num_waiting == 0
    assert method == "none" or report["spec_decode_num_accepted_tokens"] > 0
    assert {key.rows for key in eng._launcher.graphs._graphs} >= {1, 2, 4}


def test_a_step_waits_for_nothing(tmp_path: Path) -> None:
    """Once its graph is made: no wait between the plan and the copy of the results."""
    base = tiny.write_tiny(tmp_path / "target", "llama", seed=1)
    folder = tiny_drafters.write_dflash(tmp_path / "drafter", base)
    eng = engine(base, Engine.build, method="dflash", model=str(folder), device="cuda")
    assert eng.lag == 1
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
    for i in range(4):
        eng.add(request(f"r{i}", [i + 3, 5, 7], params))
    launch, calls = eng._launcher.launch, 0

    def guarded(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        torch.cuda.set_sync_debug_mode("error" if calls > 10 else "default")
        try:
            return launch(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    eng._launcher.launch = guarded
    for _ in range(30):
        eng.step()
    assert calls == 30
