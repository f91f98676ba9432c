"""The draft vocabulary of a run: the tokens that its answers are made of most.

A drafter's head has rows for these tokens alone, in the order of their ids. Counted are the answers that are
trained on; how much of the held-out answers is covered bounds what any drafter with this vocabulary
can accept.

Letters: V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from paceline.train.accept import held_out_docs
from paceline.train.shards import Shards

Ints = NDArray[np.int64]


def trained_counts(shards: Shards, vocab_size: int) -> Ints:
    """How often each token stands in the answers that are trained on, [V]."""
    return _counts(shards, np.flatnonzero(~shards.docs["held_out"]).tolist(), vocab_size)


def held_out_counts(shards: Shards, vocab_size: int) -> Ints:
    """How often the target says each token in the held-out greedy answers, [V]."""
    return _counts(shards, held_out_docs(shards).tolist(), vocab_size)


def most_frequent(counts: Ints, size: int) -> Ints:
    """The `size` most frequent tokens, [Vd], sorted by id; of equal ones the lowest ids."""
    order = np.argsort(-counts, kind="stable")[:size]
    return np.sort(order)


def coverage(counts: Ints, ids: Ints) -> float:
    """Share of counted tokens that are among `ids`; 1 if nothing was counted."""
    total = int(counts.sum())
    return int(counts[ids].sum()) / total if total else 1.0


def fingerprint(ids: Ints) -> str:
    """A short digest of a vocabulary: rows of two heads can only be compared if it is the same."""
    return hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=8).hexdigest()


def _counts(shards: Shards, docs: Iterable[int], vocab_size: int) -> Ints:
    prompts = shards.docs["prompt"]
    found = np.zeros(vocab_size, dtype=np.int64)
    waiting: list[Ints] = []
    for index in docs:
        waiting.append(shards.tokens(index)[int(prompts[index]) :])
        if len(waiting) == _MANY:
            found += np.bincount(np.concatenate(waiting), minlength=vocab_size)
            waiting = []
    if waiting:
        found += np.bincount(np.concatenate(waiting), minlength=vocab_size)
    return found


_MANY = 1024  # sequences that are counted at once
