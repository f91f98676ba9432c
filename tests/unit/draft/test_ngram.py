"""NgramDrafter against prompt lookup by scanning."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.config import DraftConfig
from paceline.core.errors import ConfigError
from paceline.core.tree import from_proposals
from paceline.draft.base import HostCommit
from paceline.draft.ngram import NgramDrafter
from tests.oracle import ngram as oracle

TOKENS = st.lists(st.integers(0, 2), max_size=14)
STEP = st.one_of(
    st.tuples(st.just("join"), st.integers(0, 2), TOKENS),
    st.tuples(st.just("observe"), st.integers(0, 2), TOKENS),
    st.tuples(st.just("propose"), st.integers(0, 8)),
    st.tuples(st.just("leave"), st.integers(0, 2), st.booleans()),
)


def config(**changes: Any) -> DraftConfig:
    return DraftConfig(method="ngram", **changes)


@settings(max_examples=300)
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    most=st.integers(0, 6),
    steps=st.lists(STEP, max_size=30),
)
def test_proposals_are_those_of_a_scan(
    sizes: list[int], most: int, steps: list[tuple[Any, ...]]
) -> None:
    """The longest match, its latest occurrence, at most the budget, never past the text."""
    drafter = NgramDrafter(
        config(prompt_lookup_min=sizes[0], prompt_lookup_max=sizes[1], num_speculative_tokens=most)
    )
    texts: dict[int, list[int]] = {}
    for step in [*steps, ("propose", 8)]:
        match step:
            case "join", row, tokens if row not in texts:
                texts[row] = list(tokens)
                drafter.join(row, tokens, len(tokens) // 2, "")
            case "observe", row, tokens if row in texts:
                texts[row] += tokens
                drafter.observe(HostCommit(rows=[row], tokens=[tokens]))
            case "leave", row, keep if row in texts:
                del texts[row]
                drafter.leave(row, keep=keep)
            case "propose", budget:
                rows = sorted(texts)
                got = drafter.propose(rows, [budget] * len(rows))
                for row, proposal in zip(rows, got, strict=True):
                    _, tokens = oracle.propose(texts[row], *sizes, min(budget, most))
                    assert list(proposal.tokens) == tokens
                    assert list(proposal.parents) == list(range(-1, len(tokens) - 1))
                    assert list(proposal.sources) == [1] * len(tokens)
                    from_proposals([0], [proposal]).check()
            case _:
                pass


def test_the_most_recent_occurrence_is_copied() -> None:
    """The tie rule, by example; and a loop proposes its period, not what is past the text."""
    drafter = NgramDrafter(config())
    drafter.join(0, [1, 2, 7, 1, 2, 8, 1, 2], 8, "")
    drafter.join(1, [4, 5, 4, 5, 4, 5], 6, "")
    recent, loop = drafter.propose([0, 1], [2, 16])
    assert list(recent.tokens) == [8, 1]
    assert list(loop.tokens) == [4, 5]


def test_nothing_where_nothing_matches() -> None:
    """No match, an empty text, a match shorter than the minimum and a zero budget: empty."""
    drafter = NgramDrafter(config())
    for row, text in enumerate([[1, 2, 3], [], [1, 2, 3, 2], [1, 2, 3, 1, 2]]):
        drafter.join(row, text, len(text), "")
    for proposal in drafter.propose([0, 1, 2, 3], [9, 9, 9, 0]):
        assert list(proposal.tokens) == []


def test_rows_know_only_their_own_text() -> None:
    """Nothing crosses rows or outlives one, whatever the scope."""
    drafter = NgramDrafter(config())
    drafter.join(0, [1, 2, 3, 4], 0, "")
    drafter.join(1, [1, 2], 2, "")
    assert list(drafter.propose([1], [9])[0].tokens) == []
    drafter.leave(0, keep=True)
    drafter.join(0, [1, 2], 2, "")
    assert list(drafter.propose([0], [9])[0].tokens) == []


def test_work_per_token_is_constant() -> None:
    """One index entry per n-gram size and token, however long the text."""
    drafter = NgramDrafter(config(prompt_lookup_min=2, prompt_lookup_max=5))
    drafter.join(0, [1] * 3000, 0, "")
    row = drafter._rows[0]
    assert row.num_steps <= 4 * 3000
    before = row.num_steps
    drafter.observe(HostCommit(rows=[0], tokens=[[1] * 10]))
    assert row.num_steps - before == 4 * 10


@given(text=TOKENS, cut=st.integers(0, 14))
def test_resuming_equals_having_observed(text: list[int], cut: int) -> None:
    """A preempted request drafts as if it had never left."""
    one, two = NgramDrafter(config()), NgramDrafter(config())
    one.join(0, text[:cut], cut, "")
    one.observe(HostCommit(rows=[0], tokens=[text[cut:]]))
    two.join(0, text, cut, "")
    assert one.propose([0], [9]) == two.propose([0], [9])


def test_scores_learn_what_matches_are_worth() -> None:
    """A match that keeps failing loses its score; each proposal is judged once."""
    drafter, other = NgramDrafter(config()), NgramDrafter(config())
    scores = []
    for i in range(60):
        drafter.join(0, [1, 2, 3, 1, 2], 5, "")
        scores.append(drafter.propose([0], [6])[0].scores[0])
        drafter.observe(HostCommit(rows=[0], tokens=[[100 + i]]))
        drafter.leave(0, keep=False)
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] < scores[0] - 1.0
    other.join(0, [1, 2, 3, 1, 2], 5, "")
    other.propose([0], [6])
    for i in range(60):
        other.observe(HostCommit(rows=[0], tokens=[[100 + i]]))
    other.join(0, [1, 2, 3, 1, 2], 5, "")
    assert other.propose([0], [6])[0].scores[0] == scores[1]


@pytest.mark.parametrize("low, high", [(0, 5), (3, 2), (-1, -1)])
def test_bad_lengths_are_refused(low: int, high: int) -> None:
    """The message says what was asked, what is possible and what to do."""
    with pytest.raises(ConfigError, match=r"1 <= min <= max; set both"):
        NgramDrafter(config(prompt_lookup_min=low, prompt_lookup_max=high))


def test_negative_draft_length_is_refused() -> None:
    """A negative number of draft tokens is a mistake, not zero."""
    with pytest.raises(ConfigError, match="num_speculative_tokens -1"):
        NgramDrafter(config(num_speculative_tokens=-1))
