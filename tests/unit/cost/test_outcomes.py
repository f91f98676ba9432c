"""judge: which nodes the emitted tokens prove right or wrong."""

from __future__ import annotations

from paceline.cost.outcomes import judge

#   root - 5 - 7 - 8
#        \ 6 \ 9
TOKENS = [5, 6, 7, 9, 8]
PARENTS = [-1, -1, 0, 0, 2]


def test_a_path_and_its_siblings_are_judged() -> None:
    """Each level of the emitted path settles all children of the node above."""
    assert judge(TOKENS, PARENTS, [5, 7, 1]) == [
        (0, 0, True),
        (1, 0, False),
        (2, 1, True),
        (3, 1, False),
        (4, 2, False),
    ]


def test_what_is_off_the_path_or_past_the_end_is_unknown() -> None:
    """No verdict on nodes whose path was not emitted or whose own token is not known yet."""
    assert judge(TOKENS, PARENTS, [6, 7]) == [(0, 0, False), (1, 0, True)]
    assert judge(TOKENS, PARENTS, [5]) == [(0, 0, True), (1, 0, False)]
    assert judge(TOKENS, PARENTS, []) == []
    assert judge([], [], [1, 2]) == []
