"""DFlash, DDTree and EAGLE-3 on a CUDA device: lossless, the host builder's trees, and no sync in a draft step."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.draft.candidates import Candidates
from paceline.draft.ddtree import best_first, best_first_host
from paceline.engine.engine import Engine
from tests import network_cases, tiny, tiny_drafters
from tests.engine.harness import engine, request, run
from tests.unit.draft.test_ddtree import random_case, rows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CASES = [(name, own) for name, own in network_cases.network_cases() if "parts" not in own]
IDS = [network_cases.case_id(name, own) for name, own in CASES]
PROMPTS = [[11, 12, 13, 14, 15] * 4, [31, 7, 7, 9, 31], [5], [(3 * i) % 23 + 3 for i in range(33)]]


def without_sync(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same call, in which waiting for the device is an error (from its third time on)."""
    count = 0

    def guarded(argument: Any) -> Any:
        nonlocal count
        count += 1
        torch.cuda.set_sync_debug_mode("error" if count > 2 else "default")
        try:
            return call(argument)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return guarded


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method, own", CASES, ids=IDS)
def test_lossless_and_without_sync(
    tmp_path: Path, method: str, own: Mapping[str, Any], temperature: float
) -> None:
    """In float64, tokens are the CPU's autoregressive ones; proposing and observing never wait."""
    base = tiny.write_tiny(tmp_path / "target", "llama", seed=1)
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=2)
    jobs = [request(str(i), p, params) for i, p in enumerate(PROMPTS)]
    plain = run(engine(base, method="none"), jobs)
    texts = [p + plain[str(i)].tokens for i, p in enumerate(PROMPTS)]
    folder = tiny_drafters.BUILDERS[method](tmp_path / "drafter", base, texts, steps=60)
    eng = engine(base, Engine.build, method=method, model=str(folder), device="cuda", **own)
    drafter = eng._proposer._drafter
    drafter.propose, drafter.observe = without_sync(drafter.propose), without_sync(drafter.observe)
    done = run(eng, jobs)
    assert {n: o.tokens for n, o in done.items()} == {n: o.tokens for n, o in plain.items()}
    assert eng.report()["spec_decode_num_accepted_tokens"] > 0


def test_the_device_s_tree_is_the_host_s() -> None:
    """Both builders make the same tree of the same candidates, ties included."""
    rng = random.Random(5)
    for _ in range(100):
        roots, found, budget, cap = random_case(rng)
        moved = Candidates(**{f.name: getattr(found, f.name).cuda() for f in fields(found)})
        mine = best_first(roots.cuda(), moved, budget, topk_cap=cap)
        mine = mine.to(torch.device("cpu"))
        mine.check()
        assert rows_of(mine) == rows_of(best_first_host(roots, found, budget, topk_cap=cap))
