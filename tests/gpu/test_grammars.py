"""Grammars on a CUDA device: masks uploaded before each verify, graphs with and without them, the CPU's tokens."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.request import Request, SamplingParams
from paceline.engine.engine import Engine
from tests import grammars, network_cases, tiny, tiny_drafters
from tests.engine.harness import engine, run

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


def jobs() -> list[Request]:
    """Constrained and free requests of all kinds, with prompts that repeat themselves."""
    rng, made = random.Random(4), []
    for i in range(24):
        base = [rng.randrange(3, 12) for _ in range(rng.randrange(1, 6))]
        prompt = (base * 9)[: rng.randrange(1, 40)]
        params = SamplingParams(max_tokens=30, seed=rng.randrange(5), **rng.choice(KINDS))
        pattern = rng.choice([*grammars.PATTERNS, None])
        made.append(grammars.constrained(f"r{i}/{pattern}", prompt, params, pattern))
    return made


@pytest.mark.parametrize("graphs", ["on-demand", "off"])
@pytest.mark.parametrize("method, own", CASES, ids=IDS)
def test_the_tokens_of_the_cpu(
    tmp_path: Path, method: str, own: Mapping[str, Any], graphs: str
) -> None:
    """Constrained rows beside free ones, too few pages: every drafter, captured and not."""
    base = tiny.write_tiny(tmp_path / "target", "qwen3", seed=5)
    plain = engine(base, method="none", max_len=72)
    expected = {r.id: run(plain, [r])[r.id].tokens for r in jobs()}
    draft: dict[str, Any] = {"method": method, **own}
    if method not in dict(LISTS):
        texts = [[*r.prompt_ids, *expected[r.id]] for r in jobs()]
        build = tiny_drafters.BUILDERS[network_cases.network_in(method, own)]
        draft["model"] = str(build(tmp_path / "drafter", base, texts[:12], steps=60))
    eng = engine(
        base, Engine.build, device="cuda", max_len=72, num_pages=40, graphs=graphs, **draft
    )
    for _ in range(2):  # the second finds its graphs made
        found = run(eng, jobs())
        assert {name: outcome.tokens for name, outcome in found.items()} == expected
    for name, tokens in expected.items():
        pattern = name.split("/")[1]
        assert pattern == "None" or tokens[-1] != tiny.EOS or grammars.obeys(pattern, tokens)
    report = eng.report()
    if graphs == "on-demand" and method in dict(LISTS):
        assert report["num_steps_without_graph"] == 0
        assert any(key.masked for key in eng._launcher.graphs._graphs)
    assert method == "none" or report["spec_decode_num_forced_tokens"] > 0
