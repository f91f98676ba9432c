"""SuffixTree against a brute-force counter, with eviction, memory and step bounds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft import suffix_tree
from paceline.draft.suffix_counts import Counts, Place
from paceline.draft.suffix_tree import SuffixTree
from tests.oracle.suffix import Texts

TEXT = st.lists(st.integers(0, 2), max_size=40)
PIECES = st.lists(TEXT, max_size=6)


def every_string(texts: Texts, depth: int) -> set[tuple[int, ...]]:
    """All strings of at most `depth` tokens in the texts, and each with a token replaced."""
    found = set()
    for _, tokens in texts.sequences:
        for n in range(1, depth + 1):
            for i in range(len(tokens) - n + 1):
                string = tuple(tokens[i : i + n])
                found.add(string)
                found.add((*string[:-1], string[-1] + 1))
    return found


def assert_counts(tree: SuffixTree, texts: Texts, least: int = 1) -> None:
    """Every count and every follower is that of the texts."""
    counts = Counts(tree)
    for string in every_string(texts, tree.depth):
        place = counts.find(string)
        starts = texts.starts(string)
        assert (place is not None) == bool(starts)
        if place is None:
            continue
        assert counts.count(place) == len(starts)
        if len(string) < tree.depth:
            have = [(f.times, f.latest, f.token) for f in counts.followers(place, least)]
            want = [f for f in texts.followers(string) if f[0] >= least]
            assert sorted(have, reverse=True) == want


@given(depth=st.integers(1, 7), pieces=PIECES)
def test_counts_of_a_growing_text(depth: int, pieces: list[list[int]]) -> None:
    """Counts are exact after every append, for runs, loops and fresh text alike."""
    tree = SuffixTree(depth)
    text: list[int] = []
    for piece in pieces:
        tree.extend(piece)
        text += piece
        texts = Texts([(0, text)])
        assert_counts(tree, texts)
        assert tree.open_tokens() == text
        assert tree.open_tokens(3) == text[-3:]


@given(depth=st.integers(1, 9), text=TEXT, cuts=st.lists(st.integers(0, 40), max_size=4))
def test_own_suffixes_are_those_that_occurred_before(
    depth: int, text: list[int], cuts: list[int]
) -> None:
    """What is known of the open text's end, without a search, is what a search finds."""
    tree = SuffixTree(depth)
    edges = [0, *sorted(c for c in cuts if c <= len(text)), len(text)]
    for a, b in itertools.pairwise(edges):
        tree.extend(text[a:b])
    texts = Texts([(0, text)])
    counts = Counts(tree)
    places = counts.own_suffixes(depth)
    lengths = [n for n in range(1, min(depth, len(text) + 1)) if len(texts.starts(text[-n:])) > 1]
    assert [p.depth for p in places] == lengths
    for n, place in zip(lengths, places, strict=True):
        assert counts.count(place) == len(texts.starts(text[-n:]))
        found = counts.find(text[-n:])
        assert found is not None
        assert counts.followers(place, 1) == counts.followers(found, 1)


@settings(max_examples=150)
@given(
    depth=st.integers(1, 6),
    steps=st.lists(st.one_of(st.none(), st.lists(TEXT, min_size=1, max_size=3)), max_size=12),
)
def test_counts_after_removal(depth: int, steps: list[list[list[int]] | None]) -> None:
    """Closing and evicting sequences (None) in any order leaves the counts of what remains."""
    tree = SuffixTree(depth)
    texts = Texts([])
    at = 0
    for step in steps:
        if step is None:
            if texts.sequences:
                assert tree.evict() == len(texts.sequences.pop(0)[1])
        else:
            whole = [t for piece in step for t in piece]
            for piece in step:
                tree.extend(piece)
            tree.close()
            if whole:
                texts.sequences.append((at, whole))
            at += len(whole)
        assert_counts(tree, texts)
        assert len(tree) == sum(len(t) for _, t in texts.sequences)
        assert tree.num_sequences == len(texts.sequences)
        assert tree.num_nodes <= 2 * len(tree) + 1
    while texts.sequences:
        texts.sequences.pop(0)
        tree.evict()
    assert tree.num_nodes == 1
    assert len(tree) == 0


@settings(max_examples=150)
@given(
    least=st.integers(1, 5),
    steps=st.lists(
        st.one_of(st.none(), st.lists(st.integers(0, 8), min_size=1, max_size=25)), max_size=14
    ),
)
def test_remembered_frequent_children(least: int, steps: list[list[int] | None]) -> None:
    """A node with many children forgets none that is frequent, whatever came or went since."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix_tree, "_WIDE", 2)
        tree = SuffixTree(3)
        texts = Texts([])
        at = 0
        for step in steps:
            if step is None:
                if texts.sequences:
                    tree.evict()
                    texts.sequences.pop(0)
            else:
                tree.extend(step)
                tree.close()
                texts.sequences.append((at, step))
                at += len(step)
            assert_counts(tree, texts, least)
            assert_counts(tree, texts, least + 1)


def frequent(tree: SuffixTree, least: int) -> dict[int, int]:
    """First tokens seen at least `least` times."""
    return {f.token: f.times for f in Counts(tree).followers(Place(0, 0), least)}


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> SuffixTree:
    """A tree whose root has many children and remembers those seen 4 times: none."""
    monkeypatch.setattr(suffix_tree, "_WIDE", 2)
    tree = SuffixTree(8)
    tree.extend([1, 2, 3, 4, 5])
    tree.close()
    assert frequent(tree, 4) == {}
    return tree


def test_a_child_may_become_frequent_by_splits_alone(wide: SuffixTree) -> None:
    """Each text turns off a token earlier than the last, so none passes the child's whole run."""
    for length in (6, 5, 4, 3, 2):
        wide.extend([9, *range(20, 20 + length), 30 + length])
        wide.close()
    assert frequent(wide, 4) == {9: 5, 20: 5, 21: 5, 22: 4}


def test_a_child_may_become_frequent_in_pieces(wide: SuffixTree) -> None:
    """A suffix that waited inside a run and passes its end later has an unknown parent."""
    for _ in range(4):
        wide.extend([9])
        wide.extend([8])
        wide.close()
    assert frequent(wide, 4) == {9: 4, 8: 4}


def test_waiting_suffixes_make_a_child_frequent(wide: SuffixTree) -> None:
    """A run of one token waits inside its own leaf, which has passed but one suffix."""
    wide.extend([9] * 5)
    assert frequent(wide, 4) == {9: 5}


def _steps_per_token(text: Sequence[int], depth: int, piece: int) -> tuple[float, SuffixTree]:
    tree = SuffixTree(depth)
    for i in range(0, len(text), piece):
        tree.extend(text[i : i + piece])
    return tree.num_steps / len(text), tree


@pytest.mark.parametrize("piece", [1, 5, 4000])
@pytest.mark.parametrize("kind", ["random", "loop", "copy", "one token"])
def test_steps_are_linear_in_the_text(kind: str, piece: int) -> None:
    """Work per token does not grow with the text, on the texts that break naive trees."""
    draw = random.Random(5)
    depth = 16
    base = [draw.randrange(50) for _ in range(500)]
    made = {
        "random": lambda n: [draw.randrange(3) for _ in range(n)],
        "loop": lambda n: [1, 2, 3] * (n // 3),
        "copy": lambda n: base * (n // 500),
        "one token": lambda n: [7] * n,
    }[kind]
    short, _ = _steps_per_token(made(3000), depth, piece)
    long, tree = _steps_per_token(made(12000), depth, piece)
    assert long <= short * 1.25 + 1
    assert long <= 2 * depth
    assert tree.num_nodes <= 2 * len(tree) + 1


def test_text_is_stored_once_and_cut_after_eviction() -> None:
    """Memory is bounded: evicted tokens and nodes are reused, not kept."""
    draw = random.Random(6)
    tree = SuffixTree(8)
    sizes = []
    for i in range(300):
        tree.extend([draw.randrange(20) for _ in range(100)])
        tree.close()
        if i >= 20:
            tree.evict()
        sizes.append((len(tree.text), len(tree.count)))
    assert len(tree) == 2000
    assert max(n for n, _ in sizes) <= 2 * 2100 + 1124
    assert max(n for _, n in sizes) <= 2 * 2100 + 1


def test_eviction_costs_what_insertion_did() -> None:
    """Removing a sequence is linear in its own tokens, whatever else the tree holds."""
    draw = random.Random(7)
    tree = SuffixTree(16)
    for _ in range(60):
        tree.extend([draw.randrange(30) for _ in range(200)])
        tree.close()
    before = tree.num_steps
    for _ in range(30):
        tree.evict()
    assert tree.num_steps - before <= 30 * 200 * 16


def test_what_is_not_there() -> None:
    """Empty trees and strings, and a run's end that is not known yet, are answered."""
    tree = SuffixTree(4)
    tree.extend([])
    tree.close()
    assert tree.num_sequences == 0
    assert Counts(tree).find([1]) is None
    assert Counts(tree).find([]) == Place(0, 0)
    assert Counts(tree).find_suffixes([1, 2], 3) == []
    tree.extend([1, 2])
    counts = Counts(tree)
    assert counts.count(Place(0, 0)) == 2
    assert counts.find([1, 2, 3]) is None
    place = counts.find([1, 2])
    assert place is not None
    assert counts.followers(place, 1) == []
    assert [p.depth for p in counts.find_suffixes([9, 1, 2], 3)] == [1, 2]
