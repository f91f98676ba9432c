"""SuffixDrafter against brute-force suffix decoding, over random lives of rows."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.config import DraftConfig
from paceline.core.errors import ConfigError
from paceline.core.tree import Proposal, from_proposals
from paceline.draft.base import HostCommit
from paceline.draft.suffix import PastOutputs, SuffixDrafter
from tests.oracle import suffix as oracle

TOKENS = st.lists(st.integers(0, 3), max_size=16)


def config(**changes: Any) -> DraftConfig:
    """Small settings, at which short random texts reach every branch."""
    settings = {
        "num_speculative_tokens": 6,
        "suffix_max_depth": 5,
        "suffix_max_cached_tokens": 40,
        "suffix_min_token_prob": 0.2,
    }
    return DraftConfig(method="suffix", **{**settings, **changes})


@dataclass
class Life:
    """What brute force knows: rows' texts and the past outputs of all scopes."""

    config: DraftConfig
    rows: dict[int, tuple[str, int, list[int]]] = field(default_factory=dict)
    past: list[tuple[str, int, list[int]]] = field(default_factory=list)
    at: int = 0

    def leave(self, row: int, *, keep: bool) -> None:
        scope, num_prompt, text = self.rows.pop(row)
        limit = self.config.suffix_max_cached_tokens
        output = text[num_prompt:][-limit:] if limit else []
        if not keep or not output:
            return
        while sum(len(t) for _, _, t in self.past) + len(output) > limit:
            self.past.pop(0)
        self.past.append((scope, self.at, output))
        self.at += len(output)

    def propose(self, row: int, budget: int) -> tuple[oracle.Nodes, int]:
        scope, _, text = self.rows[row]
        return oracle.propose(
            oracle.Texts([(0, text)]),
            oracle.Texts([(at, t) for s, at, t in self.past if s == scope]),
            text,
            min(budget, self.config.num_speculative_tokens),
            longest=self.config.suffix_max_depth,
            factor=self.config.suffix_max_spec_factor,
            min_prob=self.config.suffix_min_token_prob,
            one_child=self.config.suffix_shape == "path",
        )


def assert_equal(proposal: Proposal, nodes: oracle.Nodes, source: int) -> None:
    """The same nodes in the same order; a valid tree with distinct siblings."""
    assert list(proposal.tokens) == [token for token, _, _ in nodes]
    assert list(proposal.parents) == [parent for _, parent, _ in nodes]
    assert list(proposal.sources) == [source] * len(nodes)
    assert len(set(zip(proposal.parents, proposal.tokens, strict=True))) == len(nodes)
    from_proposals([0], [proposal]).check()


STEP = st.one_of(
    st.tuples(st.just("join"), st.integers(0, 2), TOKENS, st.sampled_from(["a", "b"])),
    st.tuples(st.just("observe"), st.integers(0, 2), TOKENS),
    st.tuples(st.just("propose"), st.integers(0, 8)),
    st.tuples(st.just("leave"), st.integers(0, 2), st.booleans()),
)


@settings(max_examples=300)
@given(
    shape=st.sampled_from(["tree", "path"]),
    factor=st.sampled_from([0.5, 1.0, 2.5]),
    min_prob=st.sampled_from([0.0, 0.2, 0.5]),
    cached=st.sampled_from([0, 7, 40]),
    steps=st.lists(STEP, max_size=30),
)
def test_proposals_are_those_of_brute_force(
    shape: str, factor: float, min_prob: float, cached: int, steps: list[tuple[Any, ...]]
) -> None:
    """Whatever the rows lived through: matches, budgets, shape, ties, sources and eviction."""
    cfg = config(
        suffix_shape=shape,
        suffix_max_spec_factor=factor,
        suffix_min_token_prob=min_prob,
        suffix_max_cached_tokens=cached,
    )
    drafter, life = SuffixDrafter(cfg), Life(cfg)
    for step in [*steps, ("propose", 8)]:
        match step:
            case "join", row, tokens, scope if row not in life.rows:
                life.rows[row] = (scope, len(tokens) // 2, list(tokens))
                drafter.join(row, tokens, len(tokens) // 2, scope)
            case "observe", row, tokens if row in life.rows:
                life.rows[row][2].extend(tokens)
                drafter.observe(HostCommit(rows=[row], tokens=[tokens]))
            case "leave", row, keep if row in life.rows:
                life.leave(row, keep=keep)
                drafter.leave(row, keep=keep)
            case "propose", budget:
                rows = sorted(life.rows)
                got = drafter.propose(rows, [budget] * len(rows))
                for row, proposal in zip(rows, got, strict=True):
                    assert_equal(proposal, *life.propose(row, budget))
            case _:
                pass
        assert drafter.num_cached_tokens == sum(len(t) for _, _, t in life.past)
        assert drafter.num_cached_tokens <= cached


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6))
def test_long_copies_with_the_default_settings(seed: int) -> None:
    """Deep matches and full proposals, which short random texts never reach."""
    draw = random.Random(seed)
    cfg = DraftConfig(method="suffix")
    drafter, life = SuffixDrafter(cfg), Life(cfg)
    base = [draw.randrange(12) for _ in range(60)]
    for turn in range(3):
        text = list(base[draw.randrange(20) :])
        life.rows[0] = ("", 10, text)
        drafter.join(0, text, 10, "")
        for _ in range(6):
            budget = draw.randrange(1, 20)
            (proposal,) = drafter.propose([0], [budget])
            assert_equal(proposal, *life.propose(0, budget))
            start = draw.randrange(40)
            new = base[start : start + draw.randrange(1, 30)]
            text += new
            drafter.observe(HostCommit(rows=[0], tokens=[new]))
        life.leave(0, keep=turn != 1)
        drafter.leave(0, keep=turn != 1)


def test_worked_example() -> None:
    """The numbers of the paper's rule, by hand: ratios, budget by match length, source."""
    drafter = SuffixDrafter(config(suffix_min_token_prob=0.1))
    # "1 2" was followed by 3 twice and by 4 once, and ends the text: 2/4 and 1/4.
    drafter.join(0, [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 1, 2], 13, "")
    (proposal,) = drafter.propose([0], [16])
    assert list(proposal.tokens) == [3, 4]
    assert list(proposal.parents) == [-1, -1]
    assert list(proposal.sources) == [1, 1]


def test_ties_go_to_the_own_text_and_to_the_longer_match() -> None:
    """At equal scores the row's own text wins over the past."""
    drafter = SuffixDrafter(config(num_speculative_tokens=1))
    for output in ([5, 6], [5, 7]):
        drafter.join(0, output, 0, "")
        drafter.leave(0, keep=True)
    drafter.join(0, [5, 8, 5], 3, "")  # own: 8 in 1 of 2; past: 7 and 6 in 1 of 2 each
    (proposal,) = drafter.propose([0], [1])
    assert list(proposal.tokens) == [8]
    assert list(proposal.sources) == [1]


def test_nothing_where_nothing_matches() -> None:
    """Fresh text, an empty row and a budget of zero give an empty proposal, never padding."""
    drafter = SuffixDrafter(config())
    drafter.join(0, [1, 2, 3], 3, "")
    drafter.join(1, [], 0, "")
    drafter.join(2, [1, 2, 1, 2], 3, "")
    none, empty, off = drafter.propose([0, 1, 2], [6, 6, 0])
    assert list(none.tokens) == list(empty.tokens) == list(off.tokens) == []
    (some,) = drafter.propose([2], [1])
    assert list(some.tokens) == [1]


def test_prompts_are_not_remembered() -> None:
    """The past holds outputs only; an abort or a preemption leaves nothing in it."""
    drafter = SuffixDrafter(config())
    drafter.join(0, [1, 2, 3, 7, 8, 9], 3, "")
    drafter.leave(0, keep=False)
    assert drafter.num_cached_tokens == 0
    drafter.join(0, [1, 2, 3, 7, 8, 9], 3, "")
    drafter.leave(0, keep=True)
    assert drafter.num_cached_tokens == 3
    drafter.join(0, [1, 2], 2, "")
    drafter.join(1, [7, 8], 2, "")
    prompt, output = drafter.propose([0, 1], [6, 6])
    assert list(prompt.tokens) == []
    assert list(output.tokens) == [9]
    assert list(output.sources) == [2]


def test_scopes_share_nothing() -> None:
    """What one tenant's requests said is never proposed to another's."""
    drafter = SuffixDrafter(config())
    drafter.join(0, [5, 6, 7], 0, "a")
    drafter.leave(0, keep=True)
    for row, scope in enumerate(["a", "b", ""]):
        drafter.join(row, [5, 6], 2, scope)
    mine, other, nobody = drafter.propose([0, 1, 2], [6, 6, 6])
    assert list(mine.tokens) == [7]
    assert list(other.tokens) == list(nobody.tokens) == []


def test_the_oldest_output_of_any_scope_is_evicted_first() -> None:
    """One memory budget over all scopes; an emptied scope's tree is dropped."""
    past = PastOutputs(8, 10)
    past.add("a", [1, 2, 3, 4])
    past.add("b", [5, 6, 7, 8])
    past.add("b", [1, 1, 1])
    assert past.tree("a") is None
    assert past.num_tokens == 7
    past.add("c", list(range(100)))
    assert past.tree("b") is None
    assert past.num_tokens == 10
    kept = past.tree("c")
    assert kept is not None
    assert kept.text == list(range(90, 100))
    past.add("c", [])
    assert past.num_tokens == 10


@given(prompt=TOKENS, output=TOKENS, cut=st.integers(0, 16))
def test_resuming_equals_having_observed(prompt: list[int], output: list[int], cut: int) -> None:
    """A preempted request drafts as if it had never left, and leaves the same output behind."""
    one, two = SuffixDrafter(config()), SuffixDrafter(config())
    one.join(0, prompt, len(prompt), "")
    one.observe(HostCommit(rows=[0], tokens=[output[:cut]]))
    one.observe(HostCommit(rows=[0], tokens=[output[cut:]]))
    two.join(0, prompt + output, len(prompt), "")
    assert one.propose([0], [6]) == two.propose([0], [6])
    for drafter in (one, two):
        drafter.leave(0, keep=True)
        drafter.join(0, prompt, len(prompt), "")
    assert one.num_cached_tokens == two.num_cached_tokens == len(output)
    assert one.propose([0], [6]) == two.propose([0], [6])


def test_scores_learn_what_matches_are_worth() -> None:
    """A match that keeps failing loses its score, one that holds keeps it, unverified or not."""
    drafter = SuffixDrafter(config(suffix_max_cached_tokens=0))
    first = last = 0.0
    for i in range(60):
        drafter.join(0, [1, 2, 3, 1, 2], 5, "")
        (proposal,) = drafter.propose([0], [6])
        assert list(proposal.tokens) == [3, 1]
        last = proposal.scores[0]
        first = first or last
        drafter.observe(HostCommit(rows=[0], tokens=[[100 + i]]))
        drafter.leave(0, keep=False)
    assert math.exp(last) < 0.15 < math.exp(first)


def test_a_proposal_is_judged_once() -> None:
    """Steps that were not drafted for teach nothing about the proposal before them."""
    one, two = SuffixDrafter(config()), SuffixDrafter(config())
    for drafter, times in ((one, 1), (two, 40)):
        drafter.join(0, [1, 2, 3, 1, 2], 5, "")
        drafter.propose([0], [6])
        for i in range(times):
            drafter.observe(HostCommit(rows=[0], tokens=[[100 + i]]))
        drafter.join(1, [1, 2, 3, 1, 2], 5, "")
    assert one.propose([1], [6]) == two.propose([1], [6])


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_speculative_tokens", -1),
        ("suffix_max_depth", 0),
        ("suffix_max_spec_factor", 0.0),
        ("suffix_min_token_prob", 1.5),
        ("suffix_min_token_prob", float("nan")),
        ("suffix_max_cached_tokens", -1),
        ("suffix_shape", "bush"),
    ],
)
def test_bad_settings_are_named(name: str, value: object) -> None:
    """A setting out of range is refused with its name, its value and what is possible."""
    with pytest.raises(ConfigError, match=rf"{name} .*possible is .*; correct"):
        SuffixDrafter(config(**{name: value}))


def test_no_draft_tokens() -> None:
    """num_speculative_tokens 0 is a drafter that proposes nothing."""
    drafter = SuffixDrafter(config(num_speculative_tokens=0))
    drafter.join(0, [1, 2, 1, 2], 4, "")
    assert list(drafter.propose([0], [6])[0].tokens) == []
    assert drafter.spec.max_nodes == 1
