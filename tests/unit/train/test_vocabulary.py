"""The draft vocabulary is counted from the answers that are trained on, and from nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.train.shards import Doc
from paceline.train.vocabulary import (
    coverage,
    fingerprint,
    held_out_counts,
    most_frequent,
    trained_counts,
)
from tests.unit.train.making import random_docs, write_docs

DOCS = [
    Doc(token_ids=[9, 9, 9, 5, 6, 6], num_prompt=3),
    Doc(token_ids=[9, 7, 5], num_prompt=1, temperature=1.0),
    Doc(token_ids=[9, 8, 8, 6], num_prompt=1, held_out=True),
    Doc(token_ids=[9, 4, 4], num_prompt=1, held_out=True, temperature=1.0),
]


def test_counts_are_of_answers(tmp_path: Path) -> None:
    """Prompts count nowhere; held-out answers count apart, and only greedy ones."""
    shards = write_docs(tmp_path, DOCS)
    assert dict(enumerate(trained_counts(shards, 10).tolist())) == {
        **dict.fromkeys(range(10), 0),
        5: 2,
        6: 2,
        7: 1,
    }
    assert np.flatnonzero(held_out_counts(shards, 10)).tolist() == [6, 8]


def test_counts_of_many_sequences(tmp_path: Path) -> None:
    """However they are grouped while counting."""
    docs = random_docs(1100, held_out_every=7)
    found = trained_counts(write_docs(tmp_path, docs), 97)
    told = [t for d in docs if not d.held_out for t in d.token_ids[d.num_prompt :]]
    assert found.tolist() == np.bincount(told, minlength=97).tolist()


def test_the_most_frequent_in_the_order_of_their_ids() -> None:
    """Of equally frequent tokens the lowest ids; filled up with unseen ones; all, if there is room."""
    counts = np.array([0, 3, 1, 3, 0, 7])
    assert most_frequent(counts, 2).tolist() == [1, 5]
    assert most_frequent(counts, 5).tolist() == [0, 1, 2, 3, 5]
    assert most_frequent(counts, 9).tolist() == list(range(6))


def test_coverage_and_fingerprint() -> None:
    """A share of what was counted; a digest that no two vocabularies share."""
    counts = np.array([0, 3, 1, 0, 4])
    assert coverage(counts, np.array([1, 4])) == 7 / 8
    assert coverage(np.zeros(5, dtype=np.int64), np.array([1])) == 1.0
    one, two = np.array([1, 4]), np.array([1, 3])
    assert fingerprint(one) == fingerprint(one.copy()) != fingerprint(two)
