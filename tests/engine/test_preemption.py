"""Preemption by choice: any row, at any moment. The caches stay true and no token changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline import draft as drafters
from paceline.core.batch import AttnSite
from paceline.core.registry import Registry
from paceline.core.request import SamplingParams
from paceline.draft import DRAFTERS
from paceline.engine import build
from paceline.engine.engine import Engine
from paceline.models.base import CausalLM
from tests import tiny
from tests.dense import DenseAttend, whole
from tests.engine import prophet
from tests.engine.harness import engine, request, run

OPTIONS = {"max_len": 72, "chunk_size": 7}
KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": (14, 20, 33)},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=5)


@pytest.fixture(autouse=True)
def _lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registry lines for the tests' own drafters."""
    lines = {name: f"paceline.draft.{name}:{name.title()}Drafter" for name in DRAFTERS}
    registry = Registry("drafter", {**lines, "prophet": prophet.LINE})
    monkeypatch.setattr(drafters, "DRAFTERS", registry)
    monkeypatch.setattr(build, "DRAFTERS", registry)
    line = {"scribe": "tests.engine.scribe:Scribe"}
    monkeypatch.setattr(drafters, "NETWORKS", Registry("drafter", line))


class Recorder(DenseAttend):
    """Dense attention that keeps the keys and values of each layer."""

    def __init__(self) -> None:
        self.kv: list[tuple[Tensor, Tensor]] = []

    def heads(self, site: AttnSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kv.append((k, v))
        return super().heads(site, q, k, v)


class Caches:
    """Compares what the pool holds with a fresh pass: of running rows, and of pages to be found."""

    def __init__(self, eng: Engine) -> None:
        self._eng = eng
        self._known: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        self.compared = 0

    def check(self) -> None:
        """Every cached token of every row, and every page that a later prompt may take over."""
        eng = self._eng
        eng.check_integrity()
        eng._rows.apply()  # what the next step would bring to the device
        for sequence in eng._scheduler.running:
            count = sequence.num_cached
            places, row = torch.arange(count), torch.full((count,), sequence.row)
            self._compare(sequence.tokens[:count], eng._rows.slots(row, places))
        size = eng.config.cache.page_size
        for tokens, pages in self._findable():
            slots = torch.tensor([p * size + i for p in pages for i in range(size)])
            self._compare(tokens, slots)

    def _findable(self) -> Iterator[tuple[list[int], list[int]]]:
        """The text and the pages of every leaf of the prefix cache."""
        todo = [(root, [], []) for root in self._eng._scheduler._prefix._roots.values()]
        while todo:
            node, tokens, pages = todo.pop()
            if not node.children and pages:
                yield tokens, pages
            for some, child in node.children.items():
                todo.append((child, [*tokens, *some], [*pages, child.page]))

    def _compare(self, tokens: list[int], slots: Tensor) -> None:
        if not tokens:
            return
        pool = self._eng._launcher._target.pool
        for layer, (k, v) in enumerate(self._truth(tuple(tokens))):
            for mine, true in ((pool.k, k), (pool.v, v)):
                found = mine[layer][:, slots].transpose(0, 1)
                torch.testing.assert_close(found, true, rtol=1e-9, atol=1e-9)
        self.compared += len(tokens)

    @torch.inference_mode()
    def _truth(self, tokens: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        if tokens not in self._known:
            net, recorder = self._eng._launcher._target.net, Recorder()
            assert isinstance(net, CausalLM)
            net(whole(tokens), recorder)
            self._known[tokens] = recorder.kv
        return self._known[tokens]


def jobs_of(rng: random.Random) -> dict[str, tuple[list[int], SamplingParams]]:
    """Requests with common beginnings, of which some repeat themselves."""
    base = [rng.randrange(3, 12) for _ in range(rng.randrange(1, 6))]
    jobs = {}
    for i in range(6):
        own = [rng.randrange(3, 97) for _ in range(rng.randrange(3))]
        prompt = [*(base * 9)[: rng.randrange(1, 40)], *own]
        params = SamplingParams(
            max_tokens=rng.randrange(8, 26), seed=rng.randrange(5), **rng.choice(KINDS)
        )
        jobs[f"r{i}"] = prompt, params
    return jobs


def live(model: Path, method: str, seed: int, lag: int, num_pages: int | None) -> dict[str, float]:
    """Run requests while rows are preempted at random; check caches and tokens."""
    rng = random.Random(seed)
    jobs = jobs_of(rng)
    plain = engine(model, method="none", **OPTIONS)
    expected = {name: run(plain, [request(name, *job)])[name].tokens for name, job in jobs.items()}
    eng = engine(model, method=method, num_pages=num_pages, **OPTIONS)
    eng.lag = lag
    if method == "prophet":
        answers = {name: [*jobs[name][0], *expected[name]] for name in jobs}
        eng._proposer._drafter.answers |= answers
    caches, forced = Caches(eng), 0
    arrivals = list(jobs.items())
    got: dict[str, list[int]] = {name: [] for name in jobs}
    while arrivals or eng.has_work:
        if arrivals and rng.random() < 0.4:
            name, job = arrivals.pop()
            eng.add(request(name, *job, scope=name if method == "prophet" else ""))
        idle = [s for s in eng._scheduler.running if s.in_flight == 0]
        for sequence in rng.sample(idle, rng.randrange(len(idle) + 1)):
            if rng.random() < 0.25:
                eng._scheduler._preempt(sequence)
                forced += 1
                caches.check()
        for out in eng.step():
            got[out.request_id] += out.token_ids
        caches.check()
        assert forced < 500, "the requests never come to their end"
    assert got == expected
    report = eng.report()
    assert report["num_preemptions"] >= forced
    return {**report, "forced": forced, "compared": caches.compared}


@pytest.mark.parametrize("method", [*DRAFTERS, "prophet", "scribe"])
def test_whoever_is_preempted_whenever_nothing_changes(model: Path, method: str) -> None:
    """Prefilling or decoding, with drafts or without, once or often: rows come back as they were."""
    seen = {"forced": 0.0, "compared": 0.0, "spec_decode_num_accepted_tokens": 0.0}

    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
    @given(seed=st.integers(0, 10_000), num_pages=st.sampled_from([None, 30]))
    def check(seed: int, num_pages: int | None) -> None:
        report = live(model, method, seed, 0, num_pages)
        for name in seen:
            seen[name] += report[name]

    check()
    assert seen["forced"] > 5, "hardly anybody was preempted: no test"
    assert seen["compared"] > 1000, "hardly anything was compared"
    assert method != "prophet" or seen["spec_decode_num_accepted_tokens"] > 30


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10_000))
def test_with_results_one_step_behind(model: Path, seed: int) -> None:
    """As on a GPU: whoever has no step in flight may lose its row while others have."""
    live(model, "none", seed, 1, 30)
