from __future__ import annotations

import random

import pytest
import torch

from paceline.core.tree import (
    EMPTY,
    DraftTree,
    Proposal,
    Selection,
    from_proposals,
    num_words,
    root,
)
from paceline.ops.reference import tree as ops
from tests.oracle import tree as oracle


def random_tree(rng: random.Random, most: int = 12) -> tuple[DraftTree, list[Proposal]]:
    props = [
        oracle.random_proposal(rng, rng.randint(0, most), vocab=4) for _ in range(rng.randint(1, 5))
    ]
    return from_proposals([rng.randrange(4) for _ in props], props), props


def on_device_path(
    monkeypatch: pytest.MonkeyPatch, tree: DraftTree, num_tokens: int, caps: torch.Tensor
) -> Selection:
    """The way without short cuts, as a CUDA device takes it."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cpu", False, raising=False)
        return ops.select(tree, torch.zeros(caps.shape[0], dtype=torch.int64), num_tokens, caps)


def unpack(words: torch.Tensor) -> set[int]:
    return {
        64 * w + i for w, word in enumerate(words.tolist()) for i in range(64) if (word >> i) & 1
    }


def check(selection: Selection, props: list[Proposal], want: list[list[int]], width: int) -> None:
    real = sum(len(w) for w in want)
    assert selection.node[:real].tolist() == [b * width + n for b, w in enumerate(want) for n in w]
    assert (selection.node[real:] == -1).all()
    assert selection.cu_q.tolist() == [sum(len(w) for w in want[:b]) for b in range(len(want) + 1)]
    at = 0
    for prop, nodes in zip(props, want, strict=True):
        for node in nodes:
            above = {nodes.index(n) for n in oracle.ancestors(prop, node)}
            assert unpack(selection.mask[at]) == above
            at += 1
    assert (selection.mask[real:] == 0).all()


def test_select_keeps_the_best_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch's budget goes to the likeliest nodes of all rows, within each row's cap."""
    rng = random.Random(1)
    for case in range(1000):
        tree, props = random_tree(rng)
        batch, width = tree.token_ids.shape
        caps = [rng.choice([0, 1, 2, 5, 99]) for _ in range(batch)]
        budget = rng.randint(batch, batch * width + 3)
        want = oracle.select(props, budget, caps, width)
        got = ops.select(tree, torch.zeros(batch), budget, torch.tensor(caps))
        check(got, props, want, width)
        assert len(got.node) == sum(len(w) for w in want), "a CPU computes no dead entries"
        if case % 10 == 0:
            fixed = on_device_path(monkeypatch, tree, budget, torch.tensor(caps))
            assert len(fixed.node) == budget, "elsewhere shapes are fixed"
            check(fixed, props, want, width)


def test_select_gives_padded_rows_nothing() -> None:
    """A padded row must not take a token of the budget, nor a neighbour's cache place."""
    rng = random.Random(2)
    tree, props = random_tree(rng)
    while tree.token_ids.shape[0] < 3:
        tree, props = random_tree(rng)
    batch, width = tree.token_ids.shape
    rows = torch.arange(batch)
    rows[1] = -1
    caps = [99, -1, *[99] * (batch - 2)]
    want = oracle.select(props, 1000, caps, width)
    check(ops.select(tree, rows, 1000, torch.full((batch,), 99)), props, want, width)
    rows[1] = 1
    check(ops.select(tree, rows, 1000, torch.tensor(caps)), props, want, width)


@pytest.mark.parametrize("width", [63, 64, 65, 128, 200, 256])
def test_select_renumbers_masks_of_many_words(width: int) -> None:
    """Ancestor bits cross the 64-bit border, and the sign bit is a bit like any other."""
    rng = random.Random(width)
    props = [oracle.random_proposal(rng, width - 1, 50), oracle.random_proposal(rng, 9, 50)]
    tree = from_proposals([1, 2], props)
    for budget in (width // 2, width, width + 10):
        want = oracle.select(props, budget, [999, 999], width)
        got = ops.select(tree, torch.arange(2), budget, torch.tensor([999, 999]))
        check(got, props, want, width)
        assert got.mask.shape[1] == num_words(width)


def test_select_of_plain_decoding_is_the_roots() -> None:
    """Autoregressive decoding is the tree of one node: no special case elsewhere."""
    got = ops.select(root(torch.tensor([7, 8, 9])), torch.arange(3), 3, torch.zeros(3))
    assert got.node.tolist() == [0, 1, 2]
    assert got.cu_q.tolist() == [0, 1, 2, 3]
    assert got.mask.tolist() == [[1], [1], [1]]


def test_select_takes_nan_scores_last() -> None:
    """A drafter's broken score may cost speed; it may not push out other rows' nodes."""
    good = Proposal(tokens=[1, 2], parents=[-1, 0], scores=[-1.0, -2.0])
    bad = Proposal(tokens=[1, 2], parents=[-1, 0], scores=[float("nan"), float("nan")])
    tree = from_proposals([0, 0], [bad, good])
    got = ops.select(tree, torch.arange(2), 4, torch.tensor([9, 9]))
    assert got.node.tolist() == [0, 3, 4, 5]
    got = ops.select(tree, torch.arange(2), 5, torch.tensor([9, 9]))
    assert got.node.tolist() == [0, 1, 3, 4, 5]


def test_select_takes_hopeless_nodes_rather_than_none() -> None:
    """Score -inf is a real node's right; only padding is never chosen."""
    hopeless = Proposal(tokens=[1], parents=[-1], scores=[float("-inf")])
    tree = from_proposals([0, 0], [hopeless, EMPTY])
    got = ops.select(tree, torch.arange(2), 9, torch.tensor([0, 9]))
    assert got.node.tolist() == [0, 2]
    got = ops.select(tree, torch.arange(2), 4, torch.tensor([9, -1]))
    assert got.node.tolist() == [0, 1]


def test_parents_and_paths_follow_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's penalties count its own path: one wrong parent and it counts its cousin's."""
    rng = random.Random(3)
    for _ in range(100):
        tree, props = random_tree(rng)
        batch, width = tree.token_ids.shape
        budget = rng.randint(batch, batch * width)
        got = on_device_path(monkeypatch, tree, budget, torch.full((batch,), 99))
        want = oracle.select(props, budget, [99] * batch, width)
        parents = ops.parents_of(tree, got)
        paths = ops.path_tokens_of(tree, got, parents, width)
        assert paths.shape == (budget, width - 1)
        at, start = 0, 0
        for prop, nodes in zip(props, want, strict=True):
            for node in nodes:
                above = oracle.ancestors(prop, node)
                parent = start + nodes.index(above[1]) if node else -1
                assert int(parents[at]) == parent
                tokens = [prop.tokens[n - 1] for n in above[:-1]]
                assert [t for t in paths[at].tolist() if t >= 0] == tokens
                at += 1
            start += len(nodes)
        assert (parents[at:] == -1).all()
        assert (paths[at:] == -1).all()


def test_walk_is_the_dictionary_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance along any tree, partly selected, with ends and rows that are not live."""
    rng = random.Random(4)
    accepted = 0
    for _ in range(1000):
        tree, props = random_tree(rng)
        batch, width = tree.token_ids.shape
        budget = rng.randint(batch, batch * width)
        got = on_device_path(monkeypatch, tree, budget, torch.full((batch,), 99))
        want = oracle.select(props, budget, [99] * batch, width)
        targets = torch.tensor([rng.randrange(4) for _ in range(budget)])
        ends = torch.tensor([rng.random() < 0.1 for _ in range(budget)])
        live = torch.tensor([rng.random() < 0.9 for _ in range(batch)])
        flat = got.node.clamp(min=0)
        path = ops.walk(
            tree.token_ids.view(-1)[flat],
            ops.parents_of(tree, got),
            targets,
            ends,
            torch.where(live, got.cu_q[:-1], -1),
            width,
        )
        for b, (prop, nodes) in enumerate(zip(props, want, strict=True)):
            first = int(got.cu_q[b])
            there = {n: int(targets[first + i]) for i, n in enumerate(nodes)}
            over = {n for i, n in enumerate(nodes) if bool(ends[first + i])}
            expect = oracle.walk(0, prop, nodes, there, over) if bool(live[b]) else []
            have = [nodes[t - first] for t in path[b].tolist() if t >= 0]
            assert have == expect
            accepted += max(len(have) - 1, 0)
    assert accepted > 500, "the cases must accept something"


def test_walk_never_enters_padding() -> None:
    """Token -1 is nobody's token, not even of a row whose target is -1; token 0 is a token."""
    tokens = torch.tensor([5, -1, 0])
    parents = torch.tensor([-1, 0, 0])
    ends = torch.zeros(3, dtype=torch.bool)
    for target, want in ((-1, [0, -1]), (0, [0, 2])):
        path = ops.walk(
            tokens, parents, torch.full((3,), target), ends, torch.tensor([0]), num_levels=2
        )
        assert path.tolist() == [want]


def test_walk_takes_the_first_of_equal_siblings() -> None:
    """Which of two equal children is entered decides which cache entry is kept: it is fixed."""
    tokens = torch.tensor([9, 3, 3, 4, 5])
    parents = torch.tensor([-1, 0, 0, 1, 2])
    targets = torch.tensor([3, 4, 5, 1, 1])
    path = ops.walk(
        tokens, parents, targets, torch.zeros(5, dtype=torch.bool), torch.tensor([0]), 3
    )
    assert path.tolist() == [[0, 1, 3]]
