"""Does a draft vocabulary's map belong to the head above it? The head itself knows.

Where a row of the head is the likeliest, what does the target say? A row that is right stands for one
token again and again. So rows vote on what they stand for, on one half of the places looked at; on the
other half the map of the folder and the map that was read off are compared. A map that is one token off
shifts every later row: then the one that was read off is clearly better.

Letters: n places, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_LEAST_VOTES = 3  # of a row, to be heard
_CLEARLY = 0.05  # by how much a map must be better, beside being twice as good


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the map of a drafter's folder was found to be worth, on the target's own text."""

    num_places: int
    coverage: float  # share of the target's likeliest tokens that can be drafted
    right: float  # share of first drafts that are the target's likeliest token
    right_as_read: float  # the same with the map that was read off the head
    num_heard: int  # rows with enough votes
    num_agreeing: int  # of these, rows that stand for what the map says
    as_read: Ints  # [Vd] token that each row stands for by its votes; -1: not heard

    @property
    def wrong(self) -> bool:
        """Whether another map under the same head is clearly better."""
        return self.right_as_read > max(2 * self.right, self.right + _CLEARLY)

    def describe(self) -> str:
        """In words."""
        return (
            f"it covers {self.coverage:.1%} of the target's likeliest tokens; "
            f"{self.num_agreeing} of {self.num_heard} rows of the head that could be heard agree "
            f"with it; {self.right:.1%} of first drafts are right, {self.right_as_read:.1%} with a "
            f"map read off the head ({self.num_places} places)"
        )


def compare(rows: Ints, tokens: Ints, d2t: Ints, vocab_size: int) -> Findings:
    """Findings about a map.

    Args:
        rows: [n] the head's likeliest row at each place.
        tokens: [n] the target's likeliest token there.
        d2t: [Vd] the map.
        vocab_size: V.
    """
    half = read_off(rows[::2], tokens[::2], len(d2t), vocab_size)
    whole = read_off(rows, tokens, len(d2t), vocab_size)
    others, wanted = rows[1::2], tokens[1::2]
    heard = whole >= 0
    return Findings(
        num_places=len(rows),
        coverage=float(np.isin(tokens, d2t).mean()) if len(tokens) else 1.0,
        right=float((d2t[others] == wanted).mean()) if len(others) else 1.0,
        right_as_read=float((half[others] == wanted).mean()) if len(others) else 0.0,
        num_heard=int(heard.sum()),
        num_agreeing=int((whole == d2t)[heard].sum()),
        as_read=whole,
    )


def read_off(rows: Ints, tokens: Ints, num_rows: int, vocab_size: int) -> Ints:
    """The token that each row stands for by its votes, [Vd]; -1: too few, or another row has more.

    Args:
        rows: [n] the head's likeliest row at each place.
        tokens: [n] the target's likeliest token there.
        num_rows: Vd.
        vocab_size: V.
    """
    found = np.full(num_rows, -1, dtype=np.int64)
    taken: set[int] = set()
    pairs, votes = np.unique(rows * vocab_size + tokens, return_counts=True)
    for i in np.argsort(-votes, kind="stable").tolist():  # the clearest first
        row, token = divmod(int(pairs[i]), vocab_size)
        if votes[i] < _LEAST_VOTES:
            break
        if found[row] < 0 and token not in taken:
            found[row] = token
            taken.add(token)
    return found
