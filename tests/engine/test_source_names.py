"""Every drafter says where the tokens that it proposes come from; nobody else keeps a list."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.core.request import SamplingParams
from paceline.core.tree import FORCED
from paceline.draft import DRAFTERS, NETWORKS
from paceline.engine.engine import Engine
from tests import network_cases, tiny, tiny_drafters
from tests.engine.harness import engine, request, run

OWN, PAST = {1: "own text"}, {2: "past outputs"}
NAMES = {
    "none": {},
    "ngram": OWN,
    "suffix": OWN | PAST,
    "dflash": {4: "dflash"},
    "ddtree": {4: "ddtree"},
    "eagle3": {5: "eagle3"},
}
CASES: list[tuple[str, Mapping[str, Any]]] = [
    *((name, {}) for name in DRAFTERS),
    *(("merged", own) for own in tiny_drafters.HOST_PARTS["merged"]),
    *network_cases.network_cases(),
]
IDS = [network_cases.case_id(name, own) for name, own in CASES]
PROMPT = [11, 12, 13, 11, 12, 14, 11, 12, 15, 11, 12, 13, 16, 11, 12]
TEXT = [*PROMPT, *range(40, 90)]  # what networks are shown once


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=2)


@pytest.fixture(params=CASES, ids=IDS)
def case(
    request: pytest.FixtureRequest, model: Path, tmp_path: Path
) -> tuple[Engine, tuple[str, ...]]:
    """An engine with one drafter after the other, networks untrained, and the names that it is made of."""
    name, own = request.param
    parts = tuple(own.get("parts", (name,)))
    options = dict(own)
    if any(part in NETWORKS for part in parts):
        build = tiny_drafters.BUILDERS[network_cases.network_in(name, own)]
        options["model"] = str(build(tmp_path / "drafter", model, [TEXT], steps=1))
    return engine(model, method=name, **options), parts


def test_numbers_have_names(case: tuple[Engine, tuple[str, ...]]) -> None:
    """What the nodes carry is what the drafter names, and for `merged` what its parts name together."""
    eng, parts = case
    expected: dict[int, str] = {}
    for part in parts:
        expected |= NAMES[part]
    assert eng.spec.sources == expected
    assert not {0, FORCED} & set(expected), "these are the target's and the grammar's"
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    seen: set[int] = set()
    for key in ("first", "again"):  # the second time the answer is a past output
        for out in run(eng, [request(key, PROMPT, params, shows_trees=True)])[key].outputs:
            assert set(out.sources) <= {0, *expected}
            if out.tree is not None:
                seen |= set(out.tree.sources[1:])
    assert seen <= set(expected)
    assert bool(seen) == bool(expected)
    if parts == ("suffix",):
        assert seen == {1, 2}


def test_every_registered_drafter_is_looked_at() -> None:
    """A new one brings its names with it, and a line here."""
    assert set(NAMES) == {*DRAFTERS, *NETWORKS}
