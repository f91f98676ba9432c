"""What a GPU's graphs must bear, with calls in their place: all concurrencies, many steps, no growth."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest

from paceline.engine.beforehand import capture_usual
from paceline.engine.engine import Engine
from tests import tiny, tiny_drafters
from tests.engine.as_on_gpu import as_on_gpu
from tests.engine.harness import engine
from tests.sweep import LONGEST, endless, jobs_of, serve

LEVELS = (1, 3, 7, 24)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=5)


@pytest.mark.parametrize("method", ["suffix", "ddtree"])
def test_a_sweep_of_concurrency(model: Path, tmp_path: Path, method: str) -> None:
    """Joins, leaves, aborts and preemptions: plain decoding's tokens, and a graph for every step."""
    jobs = jobs_of(random.Random(3), 36)
    plain = engine(model, Engine.build, method="none", max_len=LONGEST + 8, max_rows=24)
    expected = serve(plain, jobs, 24, random.Random(1), aborts=0.0, at_once=True).finished
    draft: dict[str, Any] = {"method": method}
    if method == "ddtree":
        texts = [[*job.prompt, *expected[job.name]] for job in jobs[:12]]
        build = tiny_drafters.BUILDERS[method]
        draft["model"] = str(build(tmp_path / "drafter", model, texts, steps=40))
    eng = engine(model, Engine.build, max_len=LONGEST + 8, max_rows=24, num_pages=100, **draft)
    graphs = as_on_gpu(eng)
    capture_usual(graphs)
    for level in LEVELS:
        some = jobs[: 2 * level]
        said = serve(eng, some, level, random.Random(level), aborts=0.1, at_once=level > 6)
        said.check(expected)
        assert said.finished
    report = eng.report()
    assert report["num_steps_without_graph"] == 0
    assert report["num_preemptions"] > 0
    assert said.most_running > 16, "the widest rung was in use"
    assert {key.rows for key in graphs._graphs} == {1, 2, 4, 8, 16, 24}
    assert report["spec_decode_num_accepted_tokens"] > 0


def test_steps_leave_nothing_behind(model: Path) -> None:
    """Less than an object per request: at rest there are as many as there were 450 steps before."""
    eng = engine(model, Engine.build, method="ngram", max_len=LONGEST + 8, num_pages=36)
    as_on_gpu(eng)
    rng = random.Random(2)
    sent = endless(eng, 300, 4, rng, 0)
    held = objects_at_rest(eng, sent)
    more = endless(eng, 450, 4, rng, sent) - sent
    now = objects_at_rest(eng, sent + more)
    report = eng.report()
    assert report["num_steps_without_graph"] == 0
    assert report["num_preemptions"] > 0
    assert more > 70
    assert now < held + more


def objects_at_rest(eng: Engine, sent: int) -> int:
    """How many objects Python keeps track of once all requests are gone."""
    for number in range(sent):
        eng.abort(f"r{number}")
    while eng.has_work:
        eng.step()
    gc.collect()
    return len(gc.get_objects())
