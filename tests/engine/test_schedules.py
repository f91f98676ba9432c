"""Random lives of an engine: add, step, abort, preempt. Nothing leaks, nothing changes a token.

Host drafters live several lives; networks, which cost more, one each, on requests whose answers they half
know.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.request import FinishReason, SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.graph_keys import Trees
from paceline.engine.graphs import GraphCache, Recorded, Step
from paceline.engine.launch import Pending
from paceline.engine.plan import StepPlan
from tests import grammars, network_cases, tiny, tiny_drafters
from tests.engine.as_on_gpu import Calls, as_on_gpu, grower_of
from tests.engine.harness import engine, request, run

KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 9, "frequency_penalty": 0.5},
    {"temperature": 1.0, "min_p": 0.05, "logit_bias": {12: 1.5}},
]


NETWORK_CASES = network_cases.network_cases()
NETWORK_IDS = [network_cases.case_id(name, own) for name, own in NETWORK_CASES]
Job = tuple[list[int], SamplingParams]
Networks = Callable[[str, Mapping[str, Any]], tuple[Path, list[Job]]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=5)


@pytest.fixture(scope="session")
def networks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Networks:
    """A case's network, trained on the answers to the requests that come with it."""
    rng = random.Random(4)
    drawn = [_job(rng) for _ in range(40)]
    jobs = [job for job in drawn if len(job[0]) + job[1].max_tokens > 35][:8]  # pages run out
    plain = engine(model, method="none", max_len=72)
    made: dict[object, Path] = {}
    todo = [request(str(i), *job) for i, job in enumerate(jobs)]
    answers = [run(plain, [item])[item.id].tokens for item in todo]
    texts = [[*prompt, *answer] for (prompt, _), answer in zip(jobs, answers, strict=True)]

    def network(name: str, own: Mapping[str, Any]) -> tuple[Path, list[Job]]:
        build = tiny_drafters.BUILDERS[network_cases.network_in(name, own)]
        if build not in made:
            folder = tmp_path_factory.mktemp(name) / "drafter"
            made[build] = build(folder, model, texts, steps=40)
        return made[build], jobs

    return network


def _job(rng: random.Random) -> Job:
    """A prompt that repeats itself, and options."""
    base = [rng.randrange(3, 12) for _ in range(rng.randrange(1, 6))]
    prompt = (base * 9)[: rng.randrange(1, 40)]
    params = SamplingParams(
        max_tokens=rng.randrange(1, 30), seed=rng.randrange(5), **rng.choice(KINDS)
    )
    return prompt, params


def _life(
    model: Path,
    draft: Mapping[str, Any],
    seed: int,
    num_steps: int,
    num_pages: int,
    *,
    lag: int = 0,
    jobs: Sequence[Job] = (),
    prepare: Callable[[Engine, random.Random], None] = lambda *_: None,
) -> dict[str, float]:
    """Live a random life; compare every finished request with a fresh autoregressive run.

    Args:
        model: the target.
        draft: engine options.
        seed: of everything random.
        num_steps: until what still runs is aborted.
        num_pages: of the pool.
        lag: steps that results are late.
        jobs: what requests are drawn from; without any, prompts and options are random.
        prepare: called with the engine before it starts.

    Returns:
        The engine's counters.
    """
    rng = random.Random(seed)
    eng = engine(model, num_pages=num_pages, max_len=72, chunk_size=7, **draft)
    eng.lag = lag
    prepare(eng, random.Random(seed))
    plain = engine(model, method="none", max_len=72)
    specs: dict[str, tuple[list[int], SamplingParams]] = {}
    got: dict[str, list[int]] = {}
    open_ids: list[str] = []
    finished = []
    for index in range(num_steps):
        if len(open_ids) < 7 and rng.random() < 0.5:
            name = f"r{index}"
            prompt, params = rng.choice(jobs) if jobs else _job(rng)
            specs[name] = (prompt, params)
            got[name] = []
            eng.add(request(name, prompt, params, scope=rng.choice(["", "b"])))
            open_ids.append(name)
        if open_ids and rng.random() < 0.06:
            eng.abort(rng.choice(open_ids))
        for out in eng.step():
            got[out.request_id] += out.token_ids
            if out.finish_reason is not None:
                open_ids.remove(out.request_id)
                if out.finish_reason is not FinishReason.ABORT:
                    finished.append(out.request_id)
        eng.check_integrity()
    for name in open_ids:
        eng.abort(name)
    while eng.has_work:
        eng.step()
    eng.check_integrity()
    assert eng.num_running == eng.num_waiting == 0
    for name in finished[:12]:
        expected = run(plain, [request(name, *specs[name])])[name].tokens
        assert got[name] == expected, f"{name} of life {seed} differs from autoregressive"
    return eng.report()


@pytest.mark.parametrize("method", ["none", "ngram", "suffix"])
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10_000))
def test_random_lives(model: Path, method: str, seed: int) -> None:
    """Random schedules keep the invariants after each step and every finished request's tokens."""
    _life(model, {"method": method}, seed, num_steps=60, num_pages=30)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10_000))
def test_results_one_step_behind(model: Path, seed: int) -> None:
    """Reading results one step late, as on a GPU, changes no token and leaks nothing."""
    _life(model, {"method": "none"}, seed, num_steps=60, num_pages=30, lag=1)


@pytest.mark.parametrize("name, own", NETWORK_CASES, ids=NETWORK_IDS)
def test_a_network_s_random_life(
    model: Path, networks: Networks, name: str, own: Mapping[str, Any]
) -> None:
    """One life of each network, alone, growing a tree and merged. In steps drawn at random its trees
    are such as the host never sees, as on a GPU; their nodes are then chosen by the step.
    """
    folder, jobs = networks(name, own)
    unseen: list[int] = []

    def prepare(eng: Engine, rng: random.Random) -> None:
        proposer = eng._proposer
        grower, seen = grower_of(proposer, 4), eng._launcher.launch

        def launch(plan: StepPlan, *rest: Any) -> Pending:
            proposer.grower = grower if rng.random() < 0.5 else None
            unseen.append(proposer.grower is not None)
            return seen(plan, *rest)

        eng._launcher.launch = launch

    draft = {"method": name, "model": str(folder), **own}
    report = _life(model, draft, 6, num_steps=70, num_pages=22, jobs=jobs, prepare=prepare)
    assert sum(unseen) > 10
    assert report["num_preemptions"] > 0
    assert report["spec_decode_num_accepted_tokens"] > 20, "hardly anything was accepted"


@pytest.mark.parametrize("name, own", NETWORK_CASES, ids=NETWORK_IDS)
def test_a_network_s_life_as_on_a_gpu(
    model: Path, networks: Networks, name: str, own: Mapping[str, Any]
) -> None:
    """Whole steps over padded rows and fixed places, results one step late, drafts in flight."""
    folder, jobs = networks(name, own)
    graphs: list[GraphCache] = []

    def prepare(eng: Engine, rng: random.Random) -> None:
        del rng
        graphs.append(as_on_gpu(eng))

    draft = {"method": name, "model": str(folder), **own}
    report = _life(model, draft, 7, num_steps=70, num_pages=22, jobs=jobs, prepare=prepare)
    assert {key.trees for key in graphs[0]._graphs} >= {Trees.GROWN}
    assert len({key.rows for key in graphs[0]._graphs}) > 1, "rows were padded to several sizes"
    assert report["num_preemptions"] > 0
    assert report["spec_decode_num_accepted_tokens"] > 20, "hardly anything was accepted"


@pytest.mark.parametrize("method", ["none", "ngram", "suffix"])
def test_a_life_of_lists_as_on_a_gpu(model: Path, method: str) -> None:
    """The host's trees at their places, as many tokens as the next rung has; and plain steps."""
    graphs: list[GraphCache] = []

    def prepare(eng: Engine, rng: random.Random) -> None:
        del rng
        graphs.append(as_on_gpu(eng))

    report = _life(model, {"method": method}, 3, num_steps=120, num_pages=24, prepare=prepare)
    kinds = {key.trees for key in graphs[0]._graphs}
    assert kinds == ({Trees.ROOT} if method == "none" else {Trees.ROOT, Trees.GIVEN})
    assert report["num_graphs"] == len(graphs[0]._graphs) > 3
    assert report["num_steps_without_graph"] == 0
    assert report["num_preemptions"] > 0


@pytest.mark.parametrize("name", ["dflash", "eagle3"])
def test_a_network_that_only_watches_is_one_step_behind(
    model: Path, networks: Networks, name: str
) -> None:
    """Without a draft node a GPU's results are read late, while the network goes on observing."""
    folder, jobs = networks(name, {})
    draft = {"method": name, "model": str(folder), "num_speculative_tokens": 0}
    report = _life(model, draft, 8, num_steps=60, num_pages=22, jobs=jobs, lag=1)
    assert report["num_preemptions"] > 0


class NoMemory(Calls):
    """A device on which the third graph finds no memory."""

    made = 0

    def record(self, step: Step) -> Recorded:
        """See `Recorder`."""
        self.made += 1
        if self.made > 2:
            raise torch.OutOfMemoryError
        return super().record(step)


@pytest.mark.parametrize("name", ["none", "suffix", "ddtree"])
def test_a_step_without_memory_for_its_graph_runs_all_the_same(
    model: Path, networks: Networks, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Operation by operation, counted, and said once for each kind of step with what to do."""
    draft: dict[str, Any] = {"method": name}
    jobs: list[Job] = []
    if name == "ddtree":
        folder, jobs = networks(name, {})
        draft["model"] = str(folder)

    def prepare(eng: Engine, rng: random.Random) -> None:
        del rng
        as_on_gpu(eng, NoMemory())

    report = _life(model, draft, 3, num_steps=70, num_pages=24, jobs=jobs, prepare=prepare)
    assert report["num_graphs"] == 2
    assert report["num_steps_without_graph"] > 5
    said = [r.getMessage() for r in caplog.records if "no memory is left" in r.getMessage()]
    assert len(said) == len(set(said)) > 0
    assert "max_rows" in said[0]


def test_a_step_whose_trees_the_host_reads_is_said_once_for_each_kind(
    model: Path, networks: Networks, caplog: pytest.LogCaptureFixture
) -> None:
    """A grammar beside a drafter network: no graph, counted, in words; as often as kinds, not as steps."""
    folder, _ = networks("ddtree", {})
    eng = engine(model, method="ddtree", model=str(folder))
    graphs = as_on_gpu(eng)
    greedy = SamplingParams(temperature=0.0, max_tokens=40)

    def said() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        return [text for text in found if "without a graph" in text]

    run(eng, [grammars.constrained("a", [5, 6], greedy, "form")])
    steps = graphs.num_eager
    assert steps > 2
    (one,) = said()
    assert one.startswith("a step of 1 row, ")
    assert "a grammar runs without a graph" in one
    assert "outputs are the same" in one
    assert "(suffix, ngram) have graphs" in one
    run(eng, [grammars.constrained(str(i), [5, 6 + i], greedy, "form") for i in range(2)])
    assert graphs.num_eager > steps + 2
    more = said()
    assert len(more) == len(set(more)) == len(graphs._read) > 1
    assert any(text.startswith("a step of 2 rows, ") for text in more)
    free = run(engine(model, method="none"), [grammars.constrained("a", [5, 6], greedy, "form")])
    again = run(eng, [grammars.constrained("a", [5, 6], greedy, "form")])
    assert again["a"].tokens == free["a"].tokens
    assert len(said()) == len(more)


def test_lives_do_preempt(model: Path) -> None:
    """The pool of the lives above is small enough that preemption happens at all."""
    report = _life(model, {"method": "suffix"}, 1, num_steps=120, num_pages=24)
    assert report["num_preemptions"] > 0


@pytest.mark.slow
def test_ten_thousand_steps_leak_nothing(tmp_path: Path) -> None:
    """Killing and aborting at random for 10,000 steps leaks no page and no row."""
    model = tiny.write_tiny(tmp_path, "qwen3", seed=5, num_hidden_layers=1)  # pages are of no layer
    _life(model, {"method": "suffix"}, 77, num_steps=10_000, num_pages=30)
