from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from paceline.api.stop_strings import StopStrings, stop_strings

SMALL = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=6)


@given(SMALL, STOPS)
def test_matches_are_the_longest_that_end_here(text: str, stops: list[str]) -> None:
    """After every character: the longest stop string that ends there, as a plain search finds it."""
    machine = StopStrings(tuple(stops))
    state = 0
    for end in range(1, len(text) + 1):
        state = machine.advance(state, text[end - 1])
        ending = [len(stop) for stop in stops if text[:end].endswith(stop)]
        assert machine.matched(state) == max(ending, default=0)


@given(SMALL, STOPS)
def test_depth_is_exactly_what_could_still_become_a_stop(text: str, stops: list[str]) -> None:
    """No character is held back without need, none is let go too early."""
    machine = StopStrings(tuple(stops))
    state = 0
    for end in range(1, len(text) + 1):
        state = machine.advance(state, text[end - 1])
        beginnings = {stop[:cut] for stop in stops for cut in range(1, len(stop) + 1)}
        held = [len(part) for part in beginnings if text[:end].endswith(part)]
        assert machine.depth(state) == max(held, default=0)


def test_equal_lists_share_one_machine() -> None:
    """A thousand requests with one stop list build one automaton."""
    assert stop_strings(("x", "yz")) is stop_strings(("x", "yz"))
