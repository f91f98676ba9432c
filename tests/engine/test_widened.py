"""A widened target with its widened drafters in the engine: the small ones' texts, and every accept length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.request import SamplingParams
from tests import tiny, tiny_drafters
from tests.engine.harness import Outcome, engine, request, run
from tests.widened import widen

PROMPTS = [
    [11, 12, 13, 14, 15] * 4,
    [31, 7, 7, 7, 9, 31, 7],
    [5],
    [(3 * i) % 23 + 3 for i in range(33)],
]
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("dflash", "dflash", {}),
    ("ddtree", "dflash", {}),
    ("eagle3", "eagle3", {}),
    ("eagle3", "eagle3", {"eagle_topk": 3, "eagle_num_steps": 4}),
    ("merged", "dflash", {"parts": ("suffix", "ddtree")}),
]
TEMPERATURES = [0.0, 1.0]
Folders = dict[str, Path]


def answers(folder: Path, temperature: float, **options: Any) -> tuple[dict[str, Outcome], int]:
    """What all prompts get, and how many drafts were accepted."""
    eng = engine(folder, **options)
    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=6, temperature=temperature)
    done = run(eng, [request(str(i), p, params) for i, p in enumerate(PROMPTS)])
    return done, eng.counters.num_accepted_tokens


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A tiny target, and drafters that half know what it says."""
    root = tmp_path_factory.mktemp("small")
    target = tiny.write_tiny(root / "llama", "llama", seed=3)
    texts = [
        [*PROMPTS[int(name)], *outcome.tokens]
        for temperature in TEMPERATURES
        for name, outcome in answers(target, temperature, method="none")[0].items()
    ]
    return {
        "target": target,
        "dflash": tiny_drafters.overfit_dflash(root / "dflash", target, texts),
        "eagle3": tiny_drafters.overfit_eagle3(root / "eagle3", target, texts),
    }


@pytest.fixture(scope="module")
def wide(small: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The same, widened."""
    out = tmp_path_factory.mktemp("wide") / "out"
    widen(small["target"], out, small["dflash"], small["eagle3"])
    return {name: out / name for name in small}


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("method,network,own", CASES, ids=str)
def test_every_step_accepts_what_it_accepted(
    small: Folders,
    wide: Folders,
    method: str,
    network: str,
    own: dict[str, Any],
    temperature: float,
) -> None:
    """Tokens are equal, and so is what each step proposed, accepted and emitted."""
    before, accepted = answers(
        small["target"], temperature, method=method, model=str(small[network]), **own
    )
    after, again = answers(
        wide["target"], temperature, method=method, model=str(wide[network]), **own
    )
    assert accepted == again
    assert accepted > 0, "nothing was accepted: no test at all"
    for name, outcome in before.items():
        assert after[name].tokens == outcome.tokens
        steps = [out.token_ids for out in outcome.outputs]
        assert [out.token_ids for out in after[name].outputs] == steps
