"""The engines of the tests are inspected: a tree or a pass that breaks its contract fails the test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline import draft
from paceline.core.batch import ForwardBatch
from paceline.core.registry import Registry
from paceline.core.request import SamplingParams
from paceline.core.tree import DraftTree, Proposal
from paceline.draft.ngram import NgramDrafter
from paceline.engine import build, step
from tests.engine.harness import engine, request, run
from tests.engine.scribe import Scribe
from tests.tiny import write_tiny

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class Orphans(NgramDrafter):
    """A host drafter whose second node comes before its parent."""

    def propose(self, rows: list[int], budgets: list[int]) -> list[Proposal]:
        return [Proposal(tokens=[3, 4], parents=[-1, 0], scores=[-1.0, -0.5]) for _ in rows]


class Optimist(Scribe):
    """A network whose nodes are sure of themselves."""

    def propose(self, rows: torch.Tensor) -> DraftTree:
        tree = super().propose(rows)
        return replace(tree, scores=tree.scores + 0.1)


@pytest.mark.parametrize("method, message", [("orphans", "above its parent"), ("optimist", "root")])
def test_a_drafters_broken_tree_fails_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, message: str
) -> None:
    """Lists of a host drafter, and a network's tensors before they are pruned."""
    hosts = Registry("drafter", {"orphans": f"{__name__}:Orphans"})
    monkeypatch.setattr(draft, "DRAFTERS", hosts)
    monkeypatch.setattr(build, "DRAFTERS", hosts)
    monkeypatch.setattr(
        draft, "NETWORKS", Registry("drafter", {"optimist": f"{__name__}:Optimist"})
    )
    eng = engine(write_tiny(tmp_path), method=method)
    with pytest.raises(AssertionError, match=message):
        run(eng, [request("a", [5, 6], PARAMS)])


def test_a_pass_that_writes_elsewhere_fails_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that is not the row's own would be noticed only by whoever owns it."""
    made = step.extend_batch

    def elsewhere(*args: object) -> ForwardBatch:
        batch = made(*args)
        return replace(batch, slots=batch.slots + 1)

    monkeypatch.setattr(step, "extend_batch", elsewhere)
    with pytest.raises(AssertionError, match="another place's slot"):
        run(engine(write_tiny(tmp_path)), [request("a", [5, 6], PARAMS)])
