"""Finds the first of many stop strings in a text that arrives character by character.

An Aho-Corasick automaton (Aho and Corasick, "Efficient string matching", CACM 18, 1975): one dictionary
look-up per character, however many strings there are, and no character is looked at twice. Its state is
also the answer to "how much of the text's end could become a stop string?": the state's depth.
Not for: tokens, holding text back (text_stream.py).
"""

from __future__ import annotations

import functools
from collections import deque


class StopStrings:
    """The automaton over a set of stop strings. State 0 is the start.

    Worked example, stop strings "abc" and "bd": after "xab" the state's depth is 2, since "ab" could
    become "abc". Then "d" follows: the failure link of "ab" is "b", which "d" completes, so `matched`
    is 2 and the text ends before "bd".

    Args:
        strings: non-empty strings.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        assert all(strings), "stop strings are non-empty; SamplingParams checks that"
        self._children: list[dict[str, int]] = [{}]
        self._failure: list[int] = [0]
        self._depth: list[int] = [0]
        self._matched: list[int] = [0]
        for string in strings:
            self._insert(string)
        self._link()

    def advance(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        while state and char not in self._children[state]:
            state = self._failure[state]
        return self._children[state].get(char, 0)

    def depth(self, state: int) -> int:
        """Characters at the end of the text that are the beginning of a stop string."""
        return self._depth[state]

    def matched(self, state: int) -> int:
        """Length of the longest stop string that ends here; 0: none does."""
        return self._matched[state]

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._children[state]:
                self._children[state][char] = len(self._children)
                self._children.append({})
                self._failure.append(0)
                self._depth.append(self._depth[state] + 1)
                self._matched.append(0)
            state = self._children[state][char]
        self._matched[state] = len(string)

    def _link(self) -> None:
        """Set failure links breadth first: a state's link is shallower, so it is ready."""
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._children[state].items():
                self._failure[child] = self.advance(self._failure[state], char)
                if not self._matched[child]:  # a whole string is longer than any of its suffixes
                    self._matched[child] = self._matched[self._failure[child]]
                queue.append(child)


@functools.lru_cache(maxsize=64)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """The automaton for these strings; requests that share a stop list share it."""
    return StopStrings(strings)
