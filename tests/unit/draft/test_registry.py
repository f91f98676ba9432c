"""The registry of drafters, and what holds for every host drafter in it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from paceline.core.config import DraftConfig
from paceline.core.errors import ConfigError
from paceline.core.tree import from_proposals
from paceline.draft import DRAFTERS, build, folder_problems
from paceline.draft.base import HostCommit


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    """A typo in --spec costs one read of the message."""
    with pytest.raises(ConfigError, match=r"drafter 'sufix'; .*ngram.*Did you mean 'suffix'"):
        build(DraftConfig(method="sufix"))


def test_none_proposes_nothing() -> None:
    """The baseline of every comparison drafts no node, whatever the text."""
    drafter = build(DraftConfig(method="none"))
    drafter.join(0, [1, 1, 1, 1], 4, "")
    drafter.observe(HostCommit(rows=[0], tokens=[[1, 1]]))
    (proposal,) = drafter.propose([0], [16])
    drafter.leave(0, keep=True)
    assert list(proposal.tokens) == []
    assert drafter.spec.max_nodes == 1
    assert drafter.spec.max_depth == 0


@pytest.mark.parametrize("name", DRAFTERS.names())
def test_every_host_drafter_keeps_the_contract(name: str) -> None:
    """Trees are valid and within budget and spec; equal lives give equal proposals."""
    config = DraftConfig(method=name, num_speculative_tokens=5)
    one, two = build(config), build(config)
    assert one.spec.name == name
    assert one.spec.on_host
    draw = random.Random(3)
    for drafter in (one, two):
        for row in range(3):
            drafter.join(row, [row, 1, 2, 1], 2, str(row % 2))
    for _ in range(200):
        rows = draw.sample(range(3), draw.randrange(1, 4))
        budgets = [draw.randrange(8) for _ in rows]
        got, again = one.propose(rows, budgets), two.propose(rows, budgets)
        assert got == again
        assert len(got) == len(rows)
        tree = from_proposals([0] * len(rows), got)
        tree.check()
        assert int(tree.depths.max()) <= one.spec.max_depth
        for proposal, budget in zip(got, budgets, strict=True):
            assert len(proposal.tokens) <= min(budget, one.spec.max_nodes - 1)
            siblings = list(zip(proposal.parents, proposal.tokens, strict=True))
            assert len(set(siblings)) == len(siblings)
        new = [[draw.randrange(3) for _ in range(draw.randrange(4))] for _ in rows]
        leaving = draw.randrange(3) if draw.random() < 0.1 else None
        for drafter in (one, two):
            drafter.observe(HostCommit(rows=rows, tokens=new))
            if leaving is not None:
                drafter.leave(leaving, keep=True)
                drafter.join(leaving, [2, 1], 1, "0")


@pytest.mark.parametrize("method", ["auto", "none", "ngram", "suffix"])
def test_a_folder_for_nobody_is_a_problem(method: str) -> None:
    """It would be ignored; the message says what would use it."""
    config = DraftConfig(method=method, model="folder")
    (problem,) = folder_problems(config)
    assert f"'{method}' uses no folder" in problem
    assert "dflash, ddtree, eagle3 use one; name the network that it holds with --spec" in problem
    assert not folder_problems(replace(config, model=None))


def test_a_folder_for_a_part_is_none() -> None:
    """Of a merged drafter one part may be a network; unknown names are somebody else's matter."""
    config = DraftConfig(method="merged", parts=("ngram", "suffix"), model="folder")
    (problem,) = folder_problems(config)
    assert "of ngram, suffix uses no folder" in problem
    assert "--spec-parts" in problem
    assert not folder_problems(replace(config, parts=("ngram", "eagle3")))
    for method in ("dflash", "ddtree", "eagle3", "unknown"):
        assert not folder_problems(replace(config, method=method))
