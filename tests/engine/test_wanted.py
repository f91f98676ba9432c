"""A request may name one of a merged drafter's parts: that one alone drafts for it, others as before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.core.errors import RequestError
from paceline.core.request import SamplingParams
from paceline.core.tree import EMPTY, Proposal
from paceline.draft.base import DrafterSpec
from paceline.engine.engine import Engine
from paceline.engine.wanted import Wanted
from tests import tiny
from tests.engine.as_on_gpu import as_on_gpu
from tests.engine.harness import engine, request, run
from tests.tiny_drafters import overfit_dflash

# Texts that repeat themselves, so that a copying drafter and a network that knows them both draft.
PROMPTS = [[11 + i, 12, 13 + i, 14, 15] * 5 for i in range(3)]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
COPIED, NETWORK = {1, 2}, {4}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=1)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[int]]:
    """What plain decoding answers."""
    jobs = [request(str(i), p, PARAMS) for i, p in enumerate(PROMPTS)]
    done = run(engine(target, method="none"), jobs)
    return [done[str(i)].tokens for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def network(target: Path, plain: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that knows the answers."""
    texts = [p + answer for p, answer in zip(PROMPTS, plain, strict=True)]
    return overfit_dflash(tmp_path_factory.mktemp("drafter"), target, texts, steps=120)


def as_lists(_: Engine) -> None:
    """As a CPU does: trees are read."""


@pytest.mark.parametrize("way", [as_lists, as_on_gpu])
def test_only_the_part_that_a_request_names_drafts_for_it(
    target: Path, network: Path, plain: list[list[int]], way: Callable[[Engine], object]
) -> None:
    """Beside requests with other wishes, in rows that others have left, and with the same tokens."""
    eng = engine(target, method="merged", parts=("suffix", "ddtree"), model=str(network))
    way(eng)
    wishes = ["suffix", "ddtree", None, "merged"]
    jobs = [
        request(f"{i} {name} {turn}", prompt, dataclasses.replace(PARAMS, drafter=name))
        for turn in range(2)
        for i, prompt in enumerate(PROMPTS)
        for name in (wishes if turn else wishes[::-1])
    ]
    found: dict[str, set[int]] = {}
    for name, outcome in run(eng, jobs).items():
        number, wish, _ = name.split()
        assert outcome.tokens == plain[int(number)], name
        sources = found.setdefault(wish, set())
        sources.update(s for out in outcome.outputs for s in out.sources)
    assert found["suffix"] & COPIED
    assert found["suffix"] <= {0, *COPIED}
    assert found["ddtree"] == {0, *NETWORK}
    assert found["None"] | found["merged"] == {0, *NETWORK} | (found["suffix"] & COPIED)


def test_a_part_that_is_not_there_is_refused(target: Path) -> None:
    """With the names that are possible, by an engine with one drafter and with two."""
    for options, possible in (
        ({"method": "suffix"}, "'suffix'"),
        ({"method": "merged", "parts": ("suffix", "ngram")}, "'merged' or 'suffix' or 'ngram'"),
    ):
        eng = engine(target, **options)
        with pytest.raises(RequestError, match=f"'eagle3' is not loaded.* name {possible};"):
            eng.add(request("a", [5, 6], SamplingParams(drafter="eagle3")))


class Part:
    """Proposes its row's number, and notes whom it was asked about."""

    def __init__(self) -> None:
        self.spec = DrafterSpec(name="part", max_nodes=2, max_depth=1, on_host=False)
        self.asked: list[tuple[list[int], list[int], list[int]]] = []

    def propose(self, rows: list[int], row_ids: torch.Tensor, budgets: list[int]) -> list[Proposal]:
        self.asked.append((list(rows), row_ids.tolist(), list(budgets)))
        return [Proposal(tokens=[r], parents=[-1], scores=[-0.1], sources=[1]) for r in rows]


def test_a_part_is_asked_about_the_rows_that_want_it() -> None:
    """Alone, in their order; and not at all where there are none."""
    wanted, part = Wanted(), Part()
    wanted.join(3, "other")
    wanted.join(5, "part")
    ids = torch.tensor([3, 4, 5])
    said = wanted.ask(part, [3, 4, 5], ids, [7, 8, 9])
    assert part.asked.pop() == ([4, 5], [4, 5], [8, 9])
    assert [list(p.tokens) for p in said] == [[], [4], [5]]
    assert list(wanted.ask(part, [3], ids[:1], [7])) == [EMPTY]
    assert not part.asked
    wanted.leave(3)
    wanted.leave(4)  # had no wish
    assert [list(p.tokens) for p in wanted.ask(part, [3], ids[:1], [7])] == [[3]]
