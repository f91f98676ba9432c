"""Trees that graphs grow are shown, and parts drafted by wish, on a CUDA device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.engine.engine import Engine
from tests import tiny
from tests.engine.harness import engine, request, run
from tests.tiny_drafters import overfit_dflash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
PROMPTS = [[11 + i, 12, 13 + i, 14, 15] * 5 for i in range(3)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=1)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    """What plain decoding answers on the CPU."""
    eng = engine(target, method="none")
    return [run(eng, [request("a", p, PARAMS)])["a"].tokens for p in PROMPTS]


@pytest.fixture(scope="module")
def network(target: Path, plain: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that knows the answers."""
    texts = [p + answer for p, answer in zip(PROMPTS, plain, strict=True)]
    return overfit_dflash(tmp_path_factory.mktemp("drafter"), target, texts, steps=120)


@pytest.mark.parametrize("graphs", ["on-demand", "off"])
def test_trees_spell_what_was_emitted(
    target: Path, network: Path, plain: list[list[int]], graphs: str
) -> None:
    """For the rows that ask, while the next step already writes where the tree lay."""
    eng = engine(
        target, Engine.build, method="ddtree", model=str(network), device="cuda", graphs=graphs
    )
    jobs = [request(str(i), p, PARAMS, shows_trees=i != 1) for i, p in enumerate(PROMPTS)]
    for _ in range(2):
        for name, outcome in run(eng, jobs).items():
            assert outcome.tokens == plain[int(name)]
            trees = [out.tree for out in outcome.outputs[1:]]
            if name == "1":
                assert not any(trees)
                continue
            newest = outcome.outputs[0].token_ids[-1]
            for out, tree in zip(outcome.outputs[1:], trees, strict=True):
                assert tree is not None
                assert tree.token_ids[0] == newest
                path = [tree.token_ids[node] for node in tree.path[1:]]
                assert path == list(out.token_ids[: len(path)])
                assert all(parent < node for node, parent in enumerate(tree.parents))
                newest = out.token_ids[-1]
            drafted = sum(len(tree.token_ids) - 1 for tree in trees)
            assert drafted == outcome.last.stats.num_drafted > 0
    assert graphs == "off" or not eng.report()["num_steps_without_graph"]


def test_only_the_part_that_a_request_names_drafts_for_it(
    target: Path, network: Path, plain: list[list[int]]
) -> None:
    """Under graphs, in one batch with requests that have other wishes."""
    eng = engine(
        target,
        Engine.build,
        method="merged",
        parts=("suffix", "ddtree"),
        model=str(network),
        device="cuda",
    )
    jobs = [
        request(f"{i} {name}", prompt, dataclasses.replace(PARAMS, drafter=name))
        for i, prompt in enumerate(PROMPTS)
        for name in ("suffix", "ddtree", None)
    ]
    found: dict[str, set[int]] = {}
    for name, outcome in run(eng, jobs).items():
        number, wish = name.split()
        assert outcome.tokens == plain[int(number)], name
        sources = found.setdefault(wish, set())
        sources.update(s for out in outcome.outputs for s in out.sources)
    assert found["suffix"] <= {0, 1, 2}
    assert len(found["suffix"]) > 1
    assert found["ddtree"] == {0, 4}
