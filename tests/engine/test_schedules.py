"""Random lives of an engine: add, step, abort, preempt. Nothing leaks, nothing changes a token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.request import FinishReason, SamplingParams
from tests import tiny
from tests.engine.harness import engine, request, run

KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 9, "frequency_penalty": 0.5},
    {"temperature": 1.0, "min_p": 0.05, "logit_bias": {12: 1.5}},
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=5)


def _life(model: Path, method: str, seed: int, num_steps: int, num_pages: int, lag: int = 0) -> int:
    """Live a random life; compare every finished request with a fresh autoregressive run."""
    rng = random.Random(seed)
    eng = engine(model, method=method, num_pages=num_pages, max_len=72, chunk_size=7)
    eng.lag = lag
    plain = engine(model, method="none", max_len=72)
    specs: dict[str, tuple[list[int], SamplingParams]] = {}
    got: dict[str, list[int]] = {}
    open_ids: list[str] = []
    finished = []
    for index in range(num_steps):
        if len(open_ids) < 7 and rng.random() < 0.5:
            name = f"r{index}"
            base = [rng.randrange(3, 12) for _ in range(rng.randrange(1, 6))]
            prompt = (base * 9)[: rng.randrange(1, 40)]
            params = SamplingParams(
                max_tokens=rng.randrange(1, 30), seed=rng.randrange(5), **rng.choice(KINDS)
            )
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
    return int(eng.report()["num_preemptions"])


@pytest.mark.parametrize("method", ["none", "ngram", "suffix"])
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10_000))
def test_random_lives(model: Path, method: str, seed: int) -> None:
    """Random schedules keep the invariants after each step and every finished request's tokens."""
    _life(model, method, seed, num_steps=60, num_pages=30)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10_000))
def test_results_one_step_behind(model: Path, seed: int) -> None:
    """Reading results one step late, as on a GPU, changes no token and leaks nothing."""
    _life(model, "none", seed, num_steps=60, num_pages=30, lag=1)


def test_lives_do_preempt(model: Path) -> None:
    """The pool of the lives above is small enough that preemption happens at all."""
    assert _life(model, "suffix", 1, num_steps=120, num_pages=24) > 0


@pytest.mark.slow
def test_ten_thousand_steps_leak_nothing(model: Path) -> None:
    """Killing and aborting at random for 10,000 steps leaks no page and no row."""
    _life(model, "suffix", 77, num_steps=10_000, num_pages=30)
