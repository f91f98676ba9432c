"""Under a grammar every drafter emits the tokens of plain decoding under it, and they obey.

Losslessness is equality, in float64; whether a text obeys is asked of Python's `re`. Constrained and free
rows share a batch, every prompt comes twice (a prefix hit), pages are too few (preemption), prompts come in
chunks, and rows join and leave. `as_on_gpu` engines take the device's path: masks of all nodes beforehand.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import draft as drafters_module
from paceline.core.registry import Registry
from paceline.core.request import FinishReason, Request, SamplingParams
from paceline.core.tree import Verdict
from paceline.draft import DRAFTERS
from paceline.engine import build
from paceline.engine.engine import Engine
from paceline.sample.verifier import verify_device
from tests import grammars, network_cases
from tests.conformance.test_drafters import PROMPTS, VARIANT_IDS, VARIANTS
from tests.conformance.test_networks import CASES, IDS
from tests.engine import prophet
from tests.engine.as_on_gpu import as_on_gpu
from tests.engine.harness import Outcome, engine, run

OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {5: 2.0, 21: -100.0, 90: 1.5}},
    "min_p": {"min_p": 0.08},
    "top_k_p": {"top_k": 12, "top_p": 0.8},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (14, 20)},
    "ignore_eos": {"ignore_eos": True},
    "cut": {"max_tokens": 7},
}
TIGHT = {"num_pages": 30, "chunk_size": 5, "max_len": 80}
Job = tuple[str, str | None, SamplingParams]  # prompt, pattern, sampling


def jobs_of(temperatures: Sequence[float], options: Sequence[str]) -> dict[str, Job]:
    """Options dealt out to prompts and patterns; every fifth row is free."""
    patterns = itertools.cycle([*grammars.PATTERNS, None])
    prompts = itertools.cycle(PROMPTS)
    jobs: dict[str, Job] = {}
    for i, (temperature, option) in enumerate(itertools.product(temperatures, options)):
        values = {"max_tokens": 30, "seed": i, "temperature": temperature, **OPTIONS[option]}
        pattern = next(patterns)
        jobs[f"{i}/{option}/{temperature}/{pattern}"] = (
            next(prompts),
            pattern,
            SamplingParams(**values),
        )
    return jobs


def asked(name: str, job: Job, scope: str = "") -> Request:
    prompt, pattern, params = job
    return grammars.constrained(name, PROMPTS[prompt], params, pattern, scope=scope)


@functools.cache
def plain(folder: Path, name: str, job: Job) -> Outcome:
    """Plain decoding under the same grammar, alone in a fresh engine."""
    return run(engine(folder, method="none", max_len=80), [asked(name, job)])[name]


@pytest.fixture(autouse=True)
def _hashable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling parameters are keys of `plain`'s cache here, although some hold a mapping."""
    monkeypatch.setattr(SamplingParams, "__hash__", lambda self: hash(repr(self)), raising=False)


def told(outcome: Outcome) -> tuple[object, ...]:
    last = outcome.last
    return outcome.tokens, last.finish_reason, last.stop_token_id, last.error


def compare(
    eng: Engine, folder: Path, jobs: Mapping[str, Job], *, repeats: int = 2, group: int = 4
) -> dict[str, float]:
    """Every job twice over in one engine; equal to plain decoding, and obedient."""
    truth = {name: plain(folder, name, job) for name, job in jobs.items()}
    if eng.spec.name == "prophet":
        answers = eng._proposer._drafter.answers
        answers |= {n: [*PROMPTS[job[0]], *truth[n].tokens] for n, job in jobs.items()}
    names = list(jobs)
    todo = [
        asked(f"{name}#{repeat}", jobs[name], scope=name)
        for start in range(0, len(names), group)
        for repeat in range(repeats)
        for name in names[start : start + group]
    ]
    hits = ends = 0
    for key, found in run(eng, todo).items():
        name = key.rpartition("#")[0]
        assert told(found) == told(truth[name]), f"{key} differs from autoregressive"
        pattern = jobs[name][1]
        if pattern is not None and found.last.stop_token_id == 2:
            assert grammars.obeys(pattern, found.tokens), found.tokens
            ends += 1
        assert found.last.stats is not None
        hits += found.last.stats.num_cached_tokens
    assert ends > len(jobs) // 2, "few answers came to their grammar's end: half a test"
    return {**eng.report(), "hits": hits}


def check_seen(seen: Mapping[str, float]) -> None:
    """That the circumstances really were those."""
    assert seen["num_preemptions"] > 0, "nobody was preempted: half a test"
    assert seen["hits"] > 0, "no prefix hit: half a test"
    assert seen["spec_decode_num_forced_tokens"] > 0, "nothing was forced: half a test"
    others = seen["spec_decode_num_accepted_tokens"] - seen["spec_decode_num_forced_tokens"]
    assert others > 0, "no drafter's token was accepted: half a test"


HOSTS = [*VARIANTS, ("prophet", {})]
HOST_IDS = [*VARIANT_IDS, "prophet"]


@pytest.fixture
def _prophet_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {name: f"paceline.draft.{name}:{name.title()}Drafter" for name in DRAFTERS}
    registry = Registry("drafter", {**lines, "prophet": prophet.LINE})
    monkeypatch.setattr(drafters_module, "DRAFTERS", registry)
    monkeypatch.setattr(build, "DRAFTERS", registry)


def device_walk(*given: Any) -> Verdict:
    """`verify` as a GPU does it, on CPU tensors."""
    *rest, allowed, host_grammars = given
    assert not host_grammars
    return verify_device(*rest, allowed)


def on_gpu(eng: Engine) -> None:
    """Steps and walk as on a GPU."""
    eng._launcher._walk = device_walk
    eng._parts = replace(eng._parts, walk=device_walk)
    as_on_gpu(eng)


@pytest.mark.usefixtures("_prophet_line")
@pytest.mark.parametrize("way", ["host", "gpu"])
@pytest.mark.parametrize("name, draft", HOSTS, ids=HOST_IDS)
def test_host_drafters(llama: Path, name: str, draft: dict[str, object], way: str) -> None:
    """Every option at temperatures 0 and 1, every circumstance, every host drafter."""
    eng = engine(llama, method=name, **TIGHT, **draft)
    if way == "gpu":
        on_gpu(eng)
    seen = compare(eng, llama, jobs_of([0.0, 1.0], list(OPTIONS)))
    check_seen(seen)
    assert seen["num_steps_without_graph"] == 0
    if name == "prophet":
        assert seen["spec_decode_num_accepted_tokens"] > 100


@pytest.mark.parametrize("way", ["host", "gpu"])
@pytest.mark.parametrize("name, own", CASES, ids=IDS)
def test_networks(
    llama: Path, drafters: Callable[..., Path], name: str, own: Mapping[str, Any], way: str
) -> None:
    """Every network, alone, as a tree and merged; trained on free answers, and so mostly cut."""
    folder = drafters(network_cases.network_in(name, own), llama)
    eng = engine(llama, method=name, model=str(folder), **TIGHT, **own)
    if way == "gpu":
        on_gpu(eng)
    seen = compare(eng, llama, jobs_of([0.0, 1.0], list(OPTIONS)[::2]))
    check_seen(seen)
    # A tree that the device grew is read by the host before the verify: such a step is no single graph.
    assert (seen["num_steps_without_graph"] > 0) == (way == "gpu")


@pytest.mark.parametrize("way", ["host", "gpu"])
def test_without_a_drafter(llama: Path, way: str) -> None:
    """Plain decoding obeys as well, by both ways of masking."""
    eng = engine(llama, method="none", **TIGHT)
    if way == "gpu":
        on_gpu(eng)
    compare(eng, llama, jobs_of([0.0, 1.0], list(OPTIONS)))
    assert eng.report()["spec_decode_num_draft_tokens"] == 0


def test_the_grammar_matters(llama: Path) -> None:
    """Without it the same requests say something else: the comparison above compares something."""
    for name, (prompt, pattern, params) in jobs_of([0.0, 1.0], ["plain", "min_p"]).items():
        if pattern is None:
            continue
        free = run(engine(llama, method="none", max_len=80), [asked(name, (prompt, None, params))])
        assert not grammars.obeys(pattern, free[name].tokens)
        assert plain(llama, name, (prompt, pattern, params)).last.finish_reason is FinishReason.STOP


def test_samples_have_a_grammar_each(llama: Path) -> None:
    """n samples of one prompt share a constraint, never a state."""
    eng = engine(llama, method="suffix")
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=30)
    todo = [
        grammars.constrained(str(i), PROMPTS["mixed"], params, "form", sample_index=i)
        for i in range(6)
    ]
    together = run(eng, todo)
    texts = set()
    for i in range(6):
        alone = run(
            engine(llama, method="none"),
            [grammars.constrained("a", PROMPTS["mixed"], params, "form", sample_index=i)],
        )["a"]
        assert together[str(i)].tokens == alone.tokens
        assert grammars.obeys("form", alone.tokens)
        texts.add(tuple(alone.tokens))
    assert len(texts) > 3
