"""One tree of several drafters: duplicates joined, survivals composed, the best kept; on any device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.config import DraftConfig
from paceline.core.errors import ConfigError
from paceline.core.tree import EMPTY, NEG_INF, DraftTree, Proposal, from_proposals, proposals_of
from paceline.draft.base import DrafterSpec
from paceline.draft.merged import Merged, fold, fold_trees, padded_tree
from tests.oracle.merged import folded

Path = tuple[int, ...]
DEPTH = 6


def paths_of(proposal: Proposal) -> list[Path]:
    """Each node as the tokens that lead to it."""
    paths: list[Path] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@st.composite
def proposals(draw: st.DrawFn, source: int, most: int = 9) -> Proposal:
    """A drafter's tree: few tokens, so that trees agree; scores in eighths, so that sums are exact."""
    tokens, parents, scores, depths = [], [], [], []
    taken = set()
    for i in range(draw(st.integers(0, most))):
        parent = draw(st.integers(-1, i - 1))
        token = draw(st.integers(0, 2))
        depth = depths[parent] + 1 if parent >= 0 else 1
        if (parent, token) in taken or depth > DEPTH:
            parent, token, depth = -1, 3 + i, 1
        taken.add((parent, token))
        above = scores[parent] if parent >= 0 else 0.0
        scores.append(above - draw(st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0, 2.0])))
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
    return Proposal(tokens=tokens, parents=parents, scores=scores, sources=[source] * len(tokens))


TWO = st.tuples(proposals(1), proposals(4))
THREE = st.tuples(proposals(1), proposals(2), proposals(5))


def check(found: Proposal, parts: Sequence[Proposal], budget: int) -> None:
    """The best nodes of the oracle's fold, with its survivals and sources."""
    truth = folded(parts)
    best = sorted((score for score, _ in truth.values()), reverse=True)[:budget]
    paths = paths_of(found)
    assert len(set(paths)) == len(paths), "a node is in the tree once"
    assert sorted(found.scores, reverse=True) == best, "the best nodes, no others"
    for path, score, source in zip(paths, found.scores, found.sources, strict=True):
        assert truth[path] == (score, source)
    for i, parent in enumerate(found.parents):
        assert -1 <= parent < i
        assert parent < 0 or found.scores[i] <= found.scores[parent]


@given(parts=TWO | THREE, budget=st.integers(0, 30))
def test_lists_fold_as_sets_of_paths_do(parts: tuple[Proposal, ...], budget: int) -> None:
    """Against a dictionary of paths, by brute force."""
    config = DraftConfig(method="merged", num_speculative_tokens=24)
    check(Merged(config).fold(parts, budget), parts, min(24, budget))


@given(
    rows=st.lists(TWO | st.just((EMPTY, EMPTY)), min_size=1, max_size=3), budget=st.integers(0, 20)
)
def test_trees_fold_as_lists_do(rows: list[tuple[Proposal, Proposal]], budget: int) -> None:
    """All rows at once, padded, in fixed shapes: the same nodes, and a valid tree."""
    trees = [padded_tree([row[i] for row in rows], 10) for i in range(2)]
    roots = torch.arange(7, 7 + len(rows))
    tree = fold_trees(roots, trees, budget, DEPTH)
    tree.check()
    assert tree.token_ids.shape == (len(rows), 1 + min(budget, 18))
    assert tree.token_ids[:, 0].tolist() == roots.tolist()
    for found, parts in zip(proposals_of(tree), rows, strict=True):
        check(found, parts, budget)


@given(rows=st.lists(proposals(3, most=12), min_size=1, max_size=3))
def test_padding_changes_nothing(rows: list[Proposal]) -> None:
    """A tree of a fixed shape is the same tree; more than a word of mask bits, too."""
    padded, plain = padded_tree(rows, 70), from_proposals([0] * len(rows), rows)
    padded.check()
    assert padded.token_ids.shape == (len(rows), 70)
    assert proposals_of(padded) == proposals_of(plain)


def test_the_example_of_the_module() -> None:
    """A path that one drafter begins and another goes on with."""

    def scored(
        tokens: list[int], parents: list[int], chances: list[float], source: int
    ) -> Proposal:
        scores: list[float] = []
        for parent, chance in zip(parents, chances, strict=True):
            above = scores[parent] if parent >= 0 else 0.0
            scores.append(above + float(torch.tensor(chance, dtype=torch.float64).log()))
        return Proposal(
            tokens=tokens, parents=parents, scores=scores, sources=[source] * len(tokens)
        )

    suffix = scored([11, 12], [-1, 0], [0.5, 0.8], 1)
    network = scored([11, 13], [-1, 0], [0.6, 0.5], 4)
    found = fold([suffix, network])
    assert paths_of(found) == [(11,), (11, 12), (11, 13)]
    assert torch.tensor(found.scores).exp().tolist() == pytest.approx([0.6, 0.48, 0.3])
    assert list(found.sources) == [4, 1, 4]


def test_what_cannot_survive_is_left_out() -> None:
    """-inf and NaN, and what is below, take no node, whichever way they are folded."""
    bad = Proposal(
        tokens=[1, 2, 3, 4], parents=[-1, 0, -1, 2], scores=[NEG_INF, -1.0, float("nan"), -1.0]
    )
    good = Proposal(tokens=[1, 5], parents=[-1, 0], scores=[-0.5, -1.0])
    assert paths_of(fold([bad, good])) == [(1,), (1, 5)]
    trees = [padded_tree([p], 5) for p in (bad, good)]
    (found,) = proposals_of(fold_trees(torch.tensor([9]), trees, 8, 4))
    assert paths_of(found) == [(1,), (1, 5)]


def test_nothing_of_it_is_read_by_the_host() -> None:
    """On meta tensors, which have no values to read; shapes depend on shapes alone."""
    trees = [padded_tree([EMPTY] * 3, n).to(torch.device("meta")) for n in (6, 9)]
    tree = fold_trees(torch.zeros(3, dtype=torch.int64, device="meta"), trees, 10, DEPTH)
    assert isinstance(tree, DraftTree)
    assert tree.scores.shape == (3, 11)
    assert tree.mask.device.type == "meta"


def test_the_whole_is_what_its_network_is() -> None:
    """Taps, cache, lookahead and scratch are the network's; nodes and depth are everybody's."""
    host = DrafterSpec(name="suffix", max_nodes=9, max_depth=8, on_host=True)
    net = DrafterSpec(
        name="eagle3",
        max_nodes=5,
        max_depth=4,
        on_host=False,
        aux_layers=(1, 2),
        lookahead=1,
        scratch=6,
    )
    merged = Merged(DraftConfig(method="merged", num_speculative_tokens=10))
    spec = merged.join([host, net])
    assert (spec.name, spec.max_nodes, spec.max_depth) == ("merged", 11, 8)
    assert (spec.on_host, spec.aux_layers, spec.lookahead, spec.scratch) == (False, (1, 2), 1, 6)
    assert merged.join([host, host]).on_host
    assert [part.method for part in merged.parts] == ["suffix", "ddtree"]


@pytest.mark.parametrize(
    "parts, words",
    [
        (("suffix", "suffiks"), "'suffiks' cannot be a part; possible: ngram, suffix"),
        (("merged", "suffix"), "'merged' cannot be a part"),
        (("none", "ngram"), "'none' cannot be a part"),
        (("ngram", "ngram"), "named twice"),
        (("dflash", "eagle3"), "dflash and eagle3 are networks"),
        ((), "no drafter is named"),
    ],
)
def test_parts_that_do_not_go_together(parts: tuple[str, ...], words: str) -> None:
    """Refused before anything is loaded, with what is possible."""
    with pytest.raises(ConfigError, match=words):
        Merged(DraftConfig(method="merged", parts=parts))


def test_equal_claims_are_the_first_drafters() -> None:
    """A tie of sources goes to the part named first, on lists and on trees."""
    one = Proposal(tokens=[1], parents=[-1], scores=[-0.5], sources=[1])
    two = Proposal(tokens=[1], parents=[-1], scores=[-0.5], sources=[4])
    for first, second in ((one, two), (two, one)):
        assert list(fold([first, second]).sources) == list(first.sources)
        tree = fold_trees(torch.tensor([0]), [padded_tree([p], 2) for p in (first, second)], 4, 2)
        assert tree.sources.tolist() == [[0, first.sources[0], 0]]
        assert tree.num_nodes.tolist() == [2]


def test_scores_never_rise_in_rounding() -> None:
    """Along a long chain of odd numbers, no child comes out above its parent."""
    generator = torch.Generator().manual_seed(0)
    steps = -torch.rand(40, 24, generator=generator) * 1e-3
    rows = [
        Proposal(tokens=range(24), parents=range(-1, 23), scores=row.cumsum(0).tolist())
        for row in steps
    ]
    trees = [padded_tree(rows, 25), padded_tree(rows[::-1], 25)]
    tree = fold_trees(torch.zeros(40, dtype=torch.int64), trees, 24, 24)
    tree.check()
    for found in proposals_of(tree):
        assert all(b <= a for a, b in pairwise(found.scores))
