"""Prompt lookup by scanning: an oracle for `paceline.draft.ngram`."""

from __future__ import annotations

from collections.abc import Sequence


def propose(text: Sequence[int], shortest: int, longest: int, budget: int) -> tuple[int, list[int]]:
    """(n, tokens): what followed the latest earlier occurrence of the longest matching end."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if list(text[start : start + n]) == list(text[-n:]):
                return n, list(text[start + n : start + n + budget])
    return 0, []
