"""Without a C compiler the promise is the same: bits equal to plain decoding, in default precision."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import draft as drafters
from paceline.core.registry import Registry
from paceline.core.request import SamplingParams
from paceline.draft import DRAFTERS
from paceline.engine import build
from paceline.ops import dispatch
from paceline.ops.cpu import native
from tests import tiny
from tests.engine import prophet
from tests.engine.harness import Outcome, engine, request, run

PROMPTS = {
    "loop": [11, 12, 13, 14, 15] * 5 + [11, 12],
    "mixed": [31, 7, 7, 7, 9, 31, 7, 7, 8, 40, 41, 42, 31, 7, 7],
    "short": [5],
    "long": [(7 * i * i + 3 * i) % 23 + 3 for i in range(75)],
}
METHODS = [*DRAFTERS, "prophet"]


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler; and a registry line for the drafter that is right."""
    monkeypatch.setattr(native, "loaded", lambda: "there is no compiler")
    monkeypatch.setattr(dispatch, "_chosen", {})
    lines = {name: f"paceline.draft.{name}:{name.title()}Drafter" for name in DRAFTERS}
    registry = Registry("drafter", {**lines, "prophet": prophet.LINE})
    monkeypatch.setattr(drafters, "DRAFTERS", registry)
    monkeypatch.setattr(build, "DRAFTERS", registry)


def told(outcome: Outcome) -> list[tuple[int, float]]:
    """Each token with its log-probability, in full precision."""
    logprobs = [entry.logprob for out in outcome.outputs for entry in out.logprobs or ()]
    return list(zip(outcome.tokens, logprobs, strict=True))


@pytest.mark.parametrize("weights", ["auto", "4bit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bits_are_those_of_plain_decoding(tmp_path: Path, dtype: str, weights: str) -> None:
    """Chains, trees, batches, chunks, preemption and prefix hits: every log-probability, bit by bit."""
    folder = tiny.write_tiny(tmp_path, "qwen3", seed=3)
    options = {"dtype": dtype, "weights": weights, "max_len": 120}
    params = {
        name: SamplingParams(temperature=i % 2, max_tokens=24, seed=i, ignore_eos=True, logprobs=0)
        for i, name in enumerate(PROMPTS)
    }
    plain = engine(folder, method="none", **options)
    assert plain.config.batch_invariant is True
    assert any("attention backend cpu not used: there is no compiler" in n for n in plain.notes)
    expected = {
        name: told(run(plain, [request(name, ids, params[name])])[name])
        for name, ids in PROMPTS.items()
    }
    accepted = 0.0
    for method in METHODS:
        eng = engine(folder, method=method, num_pages=42, chunk_size=9, **options)
        if method == "prophet":
            answers = {n: [*PROMPTS[n], *(t for t, _ in expected[n])] for n in PROMPTS}
            eng._proposer._drafter.answers |= answers
        for repeat in range(2):
            jobs = [
                request(f"{name}/{repeat}", ids, params[name], scope=name)
                for name, ids in PROMPTS.items()
            ]
            for name, outcome in run(eng, jobs).items():
                assert told(outcome) == expected[name.split("/")[0]], (method, name)
        report = eng.report()
        assert report["num_preemptions"] > 0, "nobody was preempted"
        accepted += report["spec_decode_num_accepted_tokens"]
    assert accepted > 50, "hardly anything was accepted"


def test_float64_says_that_it_promises_nothing(tmp_path: Path) -> None:
    """Who asks for float64 gets the reference, and the note."""
    eng = engine(tiny.write_tiny(tmp_path), dtype="float64")
    assert eng.config.batch_invariant is False
    assert any(note.startswith("batch-invariant: no (ReferenceAttention)") for note in eng.notes)
