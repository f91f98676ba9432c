"""Grammars on draft trees: what is cut, what is added, whose mask a node has, what a failure does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.core.config import DraftConfig
from paceline.core.request import SamplingParams
from paceline.core.tree import EMPTY, FORCED, Proposal
from paceline.draft.base import DrafterSpec, HostCommit
from paceline.draft.none import NoneDrafter
from paceline.engine.guides import Guide, forced_of, masks_of, shaped, visit
from tests import grammars, tiny
from tests.engine.as_on_gpu import as_on_gpu
from tests.engine.harness import engine, request, run
from tests.grammar_rules import Rule, V, thirds

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


def tree(draw: random.Random, size: int) -> Proposal:
    """A random tree with falling scores; siblings differ."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    taken = set()
    for i in range(size):
        parent = draw.randrange(-1, i)
        token = draw.randrange(V)
        while (parent, token) in taken:
            token = draw.randrange(V)
        taken.add((parent, token))
        tokens.append(token)
        parents.append(parent)
        scores.append((scores[parent] if parent >= 0 else 0.0) - draw.random())
    return Proposal(tokens=tokens, parents=parents, scores=scores, sources=[2] * size)


def path_of(proposal: Proposal, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(proposal.tokens[node])
        node = proposal.parents[node]
    return path[::-1]


def obeys(start: Sequence[int], path: Sequence[int]) -> bool:
    return all(t in thirds([*start, *path[:i]]) for i, t in enumerate(path))


def test_masks_along_every_path() -> None:
    """Against brute force: each node has the mask of its own path, free rows have all bits, order is rows'."""
    draw = random.Random(1)
    for _ in range(60):
        starts = [[draw.randrange(V)], None, [3, 4, draw.randrange(V)]]
        guides = []
        for start in starts:
            rule = Rule(thirds)
            rule.path = list(start or ())
            guides.append(None if start is None else Guide(rule, V))
        trees = [tree(draw, draw.randrange(13)) for _ in starts]
        words = masks_of(guides, trees, V, pinned=False)
        at = 0
        for start, proposal in zip(starts, trees, strict=True):
            for node in range(-1, len(proposal.tokens)):
                path = [] if node < 0 else path_of(proposal, node)
                bits = sum((int(w) & 0xFFFFFFFF) << (32 * i) for i, w in enumerate(words[at]))
                at += 1
                if start is None:
                    assert bits == (1 << 64) - 1
                elif obeys(start, path):
                    assert {t for t in range(64) if bits >> t & 1} == thirds([*start, *path])
        assert at == len(words)
        for start, guide in zip(starts, guides, strict=True):
            assert guide is None or guide._grammar.path == start, "the state came back"


def test_what_is_cut_and_what_is_added() -> None:
    """Only nodes that can be chosen stay, each once; forced tokens follow them; the best within the budget."""
    draw = random.Random(2)
    added = cut = 0
    for _ in range(300):
        start, budget = [draw.randrange(V)], draw.choice([*range(12), 99])
        rule = Rule(thirds)
        rule.path = list(start)
        before = tree(draw, draw.randrange(10))
        (after,) = shaped([Guide(rule, V)], [before], [budget])
        assert rule.path == start
        assert len(after.tokens) <= budget
        paths = [tuple(path_of(after, i)) for i in range(len(after.tokens))]
        assert len(set(paths)) == len(paths), "a node came twice"
        old = {tuple(path_of(before, i)): i for i in range(len(before.tokens))}
        for i, path in enumerate(paths):
            assert obeys(start, path)
            parent = after.parents[i]
            assert parent < i
            above = after.scores[parent] if parent >= 0 else 0.0
            assert after.scores[i] <= above
            if after.sources[i] == FORCED:
                assert thirds([*start, *path[:-1]]) == {path[-1]}
                assert after.scores[i] == above, (
                    "a forced token is as sure as what stands before it"
                )
                added += 1
            else:
                assert path in old
        for path in old:
            cut += not obeys(start, path)
            if obeys(start, path) and budget > 60:
                assert path in paths
    assert added > 100
    assert cut > 200


def test_where_one_token_is_forced_no_other_is_tried() -> None:
    """A grammar may take other tokens that spell the same; its mask does not allow them."""

    class Loose(Rule):
        def advance(self, token_id: int) -> bool:
            self.path.append(token_id)
            return True

    rule = Loose(lambda path: {len(path)} if len(path) < 3 else set(range(V)))
    drafted = Proposal(
        tokens=[0, 9, 1, 8, 7, 2, 5, 6],
        parents=[-1, -1, 0, 0, 1, 2, 5, 5],
        scores=[-0.1, -0.1, -0.2, -0.2, -0.2, -0.3, -0.4, -0.5],
        sources=[2] * 8,
    )
    (after,) = shaped([Guide(rule, V)], [drafted], [20])
    assert {tuple(path_of(after, i)) for i in range(len(after.tokens))} == {
        (0,),
        (0, 1),
        (0, 1, 2),
        (0, 1, 2, 5),
        (0, 1, 2, 6),
    }
    assert list(after.sources) == [FORCED] * 3 + [2] * 2
    assert list(after.scores[:3]) == [0.0] * 3


def test_forced_tokens_alone() -> None:
    """Without a drafter a forced run is a chain, no longer than the budget."""
    rule = Rule(lambda path: {len(path) + 1} if len(path) < 7 else set(range(V)))
    for budget in (0, 2, 3):
        (chain,) = forced_of([Guide(rule, V)], [budget])
        assert list(chain.tokens) == [1, 2, 3][:budget]
        assert list(chain.parents) == [-1, 0, 1][:budget]
        assert list(chain.sources) == [FORCED] * budget
    assert forced_of([None], [5]) == [EMPTY]


def test_visits_leave_no_trace_of_refused_nodes() -> None:
    """A child of what is forbidden is never looked at."""
    rule, seen = Rule(lambda path: {1, 2} if len(path) < 2 else set()), []
    proposal = Proposal(tokens=[1, 9, 2, 2, 1], parents=[-1, -1, 1, 0, 3], scores=[0.0] * 5)
    chosen = visit(Guide(rule, V), proposal, lambda node: (seen.append(node), ())[1])
    assert chosen == [True, False, False, True, False]
    assert seen == [-1, 0, 3]


class Blank(NoneDrafter):
    """Proposes nothing, but may: what is verified beside the roots is the grammar's."""

    def __init__(self, config: DraftConfig) -> None:
        size = config.num_speculative_tokens
        self.spec = DrafterSpec(name="ngram", max_nodes=size + 1, max_depth=size, on_host=True)

    def propose(self, rows: Sequence[int], budgets: Sequence[int]) -> Sequence[Proposal]:
        return [EMPTY] * len(rows)

    def observe(self, commit: HostCommit) -> None:
        pass


@pytest.fixture
def blank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-gram drafter has nothing to say."""
    monkeypatch.setattr("paceline.draft.ngram.NgramDrafter", Blank)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=1)


@pytest.mark.usefixtures("blank")
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("gpu", [False, True])
def test_forced_tokens_are_free_drafts(llama: Path, gpu: bool, adaptive: bool) -> None:
    """With a drafter that says nothing a form is filled in several tokens a step, and the stats say by whom."""
    eng = engine(llama, method="ngram", adaptive=adaptive)
    if gpu:
        as_on_gpu(eng)
    found = run(eng, [grammars.constrained("a", [5, 6], GREEDY, "form")])["a"]
    plain = run(engine(llama, method="none"), [grammars.constrained("a", [5, 6], GREEDY, "form")])[
        "a"
    ]
    assert found.tokens == plain.tokens
    stats = found.last.stats
    assert stats is not None
    assert stats.num_forced == stats.num_accepted > 8
    assert stats.num_drafted == stats.num_accepted, "a forced token is never wrong"
    assert adaptive or stats.accept_length > 1.9
    assert eng.report()["spec_decode_num_forced_tokens"] == stats.num_forced
    sources = [s for out in found.outputs for s in out.sources]
    assert sources.count(FORCED) == stats.num_forced
    assert set(sources) == {0, FORCED}
    assert plain.last.stats is not None
    assert plain.last.stats.num_forced == 0


@pytest.mark.usefixtures("blank")
def test_a_step_that_must_be_plain_is(llama: Path) -> None:
    """The policy has to know what plain decoding takes: such a step has no forced tokens either."""
    eng = engine(llama, method="ngram", adaptive=True, num_speculative_tokens=2)
    policy = eng._parts.control._policy
    assert policy is not None
    # Drafting does not pay, so only forced tokens are verified.
    policy._paying, policy._left, policy._plain_wait = False, 99, 1
    eng.add(grammars.constrained("a", [5, 6], GREEDY, "form"))
    drafted = plain = 0
    while eng.has_work:
        guide, before = eng._sequences["a"].guide, eng.counters.num_draft_tokens
        must = policy.wants_plain() and bool(guide.forced())
        eng.step()
        drafted += eng.counters.num_draft_tokens - before
        assert not must or eng.counters.num_draft_tokens == before
        plain += must
    assert drafted > 3
    assert plain > 0


def test_a_row_with_a_grammar_is_read_at_once(llama: Path) -> None:
    """On a GPU results come a step late, but not while a grammar has to follow them."""
    eng = engine(llama, method="none")
    as_on_gpu(eng)
    assert eng.lag == 1
    eng.add(request("free", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=30)))
    lags = []
    for i in range(20):
        if i == 5:
            eng.add(grammars.constrained("list", [8], SamplingParams(max_tokens=6, seed=1), "list"))
        eng.step()
        lags.append((eng._scheduler.has_grammar, len(eng._pending)))
    assert (False, 1) in lags
    assert (True, 0) in lags
    assert (True, 1) not in lags
    assert lags[-1] == (False, 1), "and a step late again once it has ended"


def test_abort_and_resume(llama: Path) -> None:
    """An aborted row's grammar holds nobody up; the same constraint serves the next request afresh."""
    eng = engine(llama, method="suffix")
    eng.add(grammars.constrained("a", [5, 6], GREEDY, "form"))
    for _ in range(4):
        eng.step()
    eng.abort("a")
    while eng.has_work:
        eng.step()
    again = run(eng, [grammars.constrained("b", [5, 6], GREEDY, "form")])["b"]
    assert grammars.obeys("form", again.tokens)
    assert not eng._scheduler.has_grammar
