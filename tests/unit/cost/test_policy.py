"""Policy: the choice itself, its bookkeeping, and its throughput on synthetic worlds."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.tree import EMPTY, Proposal
from paceline.cost.policy import Calibration, Choice, Policy
from paceline.cost.table import StepCosts

FLAT = [(1, 1, 0.010), (1, 64, 0.011)]
STEEP = [(1, 1, 0.010), (1, 2, 0.018), (1, 64, 0.514)]


def chain(*chances: float) -> Proposal:
    """A chain of tokens 1, 2, ... with these conditional survivals."""
    scores, total = [], 0.0
    for chance in chances:
        total += math.log(chance) if chance > 0 else -math.inf
        scores.append(total)
    n = len(chances)
    return Proposal(tokens=range(1, n + 1), parents=range(-1, n - 1), scores=scores)


@st.composite
def trees(draw: st.DrawFn) -> Proposal:
    """A tree with any scores that never rise along a path."""
    n = draw(st.integers(0, 8))
    parents, scores = [], []
    for i in range(n):
        parent = draw(st.integers(-1, i - 1))
        parents.append(parent)
        above = scores[parent] if parent >= 0 else 0.0
        scores.append(above + math.log(draw(st.floats(0.01, 1.0))))
    return Proposal(tokens=range(n), parents=parents, scores=scores)


@given(
    proposals=st.lists(trees(), min_size=1, max_size=4),
    prior=st.sampled_from([FLAT, STEEP, [(1, 1, 0.01), (1, 8, 0.012), (1, 9, 0.03)]]),
)
def test_the_choice_is_the_best_of_all_numbers_of_nodes(
    proposals: list[Proposal], prior: list[tuple[int, int, float]]
) -> None:
    """Closed under parents, consistent, and no other n has a better rate."""
    policy = Policy(StepCosts(prior))
    choice = policy.choose(range(len(proposals)), proposals)
    survival = []
    for proposal, keep in zip(proposals, choice.keep, strict=True):
        assert len(keep) == len(proposal.tokens)
        paths: list[float] = []
        for i, parent in enumerate(proposal.parents):
            above_score = proposal.scores[parent] if parent >= 0 else 0.0
            above = paths[parent] if parent >= 0 else 1.0
            claimed = math.exp(min(0.0, proposal.scores[i] - above_score))
            paths.append(above * min(0.999, policy.calibration.chance(claimed)))
            assert not keep[i] or parent < 0 or keep[parent]
        survival += paths
    rows = len(proposals)
    curve = policy.costs.curve(rows, len(survival))
    best = sorted(survival, reverse=True)
    rates = [(rows + sum(best[:n])) / curve[n] for n in range(len(best) + 1)]
    assert choice.num_nodes == sum(map(sum, choice.keep))
    assert choice.expected_tokens / choice.expected_seconds == pytest.approx(
        rates[choice.num_nodes]
    )
    assert rates[choice.num_nodes] >= max(rates) / 1.0101
    assert choice.num_nodes == 0 or rates[choice.num_nodes] >= max(rates[1:]) * (1 - 1e-12)
    assert choice.plain_seconds == pytest.approx(curve[0])


def test_a_drop_is_no_end() -> None:
    """A step in the cost curve is crossed if what lies behind it pays."""
    policy = Policy(StepCosts([(1, 1, 0.010), (1, 2, 0.0149), (1, 16, 0.015)]))
    choice = policy.choose(["a"], [chain(0.45, *[0.98] * 14)])
    assert choice.num_nodes == 15


def test_the_batch_has_one_budget() -> None:
    """The best nodes of all rows are taken, not the same number of each."""
    policy = Policy(StepCosts([(1, 2, 0.010), (1, 6, 0.011), (1, 7, 0.1), (1, 8, 0.2)]))
    choice = policy.choose(["a", "b"], [chain(*[0.97] * 6), chain(*[0.3] * 6)])
    assert [sum(keep) for keep in choice.keep] == [4, 0]


def test_scores_that_say_nothing_are_worth_nothing() -> None:
    """NaN and -inf are never verified before real claims and break nothing."""
    policy = Policy(StepCosts(FLAT))
    bad = Proposal(tokens=[1, 2, 3], parents=[-1, -1, 1], scores=[math.nan, -math.inf, -math.inf])
    choice = policy.choose(["a", "b"], [bad, chain(0.9)])
    assert [list(keep) for keep in choice.keep] == [[False] * 3, [True]]
    policy.observe(choice, [[1], [1, 5]], 0.01)


def play(policy: Policy, proposal: Proposal, emitted: list[int]) -> Choice:
    """One step of a single row at the cost of STEEP."""
    choice = policy.choose(["row"], [proposal])
    policy.observe(choice, [emitted], 0.010 + 0.008 * choice.num_nodes)
    return choice


def test_unverified_nodes_teach_too() -> None:
    """Where drafting is off, plain decoding shows that the first tokens were right."""
    policy = Policy(StepCosts([(1, 1, 0.010), (1, 2, 0.0165), (1, 64, 0.05)]))
    steps = 0
    while not (choice := policy.choose(["row"], [chain(0.55)])).num_nodes:
        policy.observe(choice, [[1]], 0.010)
        steps += 1
    assert 1 <= steps <= 7
    assert not choice.probe


def test_probes_come_at_growing_distances() -> None:
    """Every 8th step, doubling to 256 while probes lose; 8 again after one that wins."""
    policy = Policy(StepCosts(STEEP))
    probes = []
    for step in range(1200):
        choice = play(policy, chain(0.3), [9])
        assert choice.probe == bool(choice.num_nodes)
        if choice.probe:
            probes.append(step)
    gaps = [b - a - 1 for a, b in itertools.pairwise(probes)]
    assert probes[0] == 8
    assert gaps == [16, 32, 64, 128, 256, 256, 256]
    won = False
    for _ in range(300):
        choice = policy.choose(["row"], [chain(0.3)])
        won = choice.probe
        policy.observe(choice, [[1, 9] if won else [9]], 0.018 if won else 0.010)
        if won:
            break
    assert won
    gap = 0
    while not play(policy, chain(0.3), [9]).probe:
        gap += 1
    assert gap == 8


def test_steps_without_offers_wait_for_no_probe() -> None:
    """A drafter that found nothing has nothing to probe."""
    policy = Policy(StepCosts(STEEP))
    for _ in range(50):
        assert play(policy, EMPTY, [9]).num_nodes == 0
    assert not policy.choose(["row"], [chain(0.3)]).probe


def test_a_useless_drafter_is_asked_ever_less() -> None:
    """It may lose two plain steps' time, then only probes; it returns when it helps."""
    policy = Policy(StepCosts(FLAT))
    asked = []
    for step in range(2000):
        if policy.wants_drafts():
            asked.append(step)
            choice = policy.choose(["row"], [EMPTY])
            policy.observe(choice, [[9]], 0.010, propose_seconds=0.004)
        else:
            choice = policy.skip(["row"])
            assert choice.num_nodes == 0
            assert not choice.drafted
            policy.observe(choice, [[9]], 0.010)
    assert len(asked) * 0.004 <= 2000 * 0.010 * 0.01
    while not policy.wants_drafts():
        policy.observe(policy.skip(["row"]), [[9]], 0.010)
    choice = policy.choose(["row"], [chain(0.9, 0.9)])
    policy.observe(choice, [[1, 2, 3]], 0.010, propose_seconds=0.004)
    assert policy.wants_drafts()
    policy.observe(policy.choose(["row"], [EMPTY]), [[9]], 0.010, propose_seconds=0.004)
    assert policy.wants_drafts()


def test_plain_decoding_is_measured_now_and_then() -> None:
    """Where drafting always pays, its baseline is still timed: after 4 steps, doubling to 128."""
    policy = Policy(StepCosts(FLAT))
    plain = []
    for step in range(700):
        if policy.wants_drafts():
            choice = policy.choose(["row"], [chain(0.9, 0.9)])
            policy.observe(choice, [[1, 2, 9]], 0.010, 0.0001)
            assert choice.num_nodes == 2
        else:
            plain.append(step)
            policy.observe(policy.skip(["row"]), [[1]], 0.010)
    gaps = [b - a - 1 for a, b in itertools.pairwise(plain)]
    assert plain[0] == 4
    assert gaps[:5] == [8, 16, 32, 64, 128]
    assert set(gaps[5:]) == {128}


def test_a_row_that_accepts_less_gets_less() -> None:
    """Rows with the same scores and different texts part within a few steps; forget ends it."""
    policy = Policy(StepCosts([(1, 1, 0.010), (1, 64, 0.073)]))
    choice = None
    for _ in range(60):
        choice = policy.choose(["good", "bad"], [chain(0.6, 0.6), chain(0.6, 0.6)])
        policy.observe(choice, [[1, 2, 9], [9]], 0.010 + 0.001 * choice.num_nodes)
    assert choice is not None
    assert [sum(keep) for keep in choice.keep] == [2, 0]
    policy.forget("bad")
    policy.forget("never seen")
    again = policy.choose(["good", "bad"], [chain(0.6, 0.6), chain(0.6, 0.6)])
    assert again.keep[1][0]


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=300),
    st.lists(st.floats(0, 1), min_size=2, max_size=10),
)
def test_calibration_is_monotone(judged: list[tuple[float, bool]], claims: list[float]) -> None:
    """A higher claim is never worth less, whatever luck was had; and all stay in [0, 1]."""
    calibration = Calibration()
    for claimed, right in judged:
        calibration.learn(claimed, right)
    worth = [calibration.chance(c) for c in sorted(claims)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(worth))
    assert all(0.0 <= w <= 1.0 for w in worth)


@pytest.mark.parametrize("truth", [lambda p: p, lambda p: p**3, math.sqrt])
def test_calibration_learns_what_claims_are_worth(truth: Callable[[float], float]) -> None:
    """Honest, boasting and modest scores are told apart, within the width of a class."""
    draw = random.Random(1)
    calibration = Calibration()
    for _ in range(6000):
        claimed = draw.random()
        calibration.learn(claimed, draw.random() < truth(claimed))
    for claimed in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert calibration.chance(claimed) == pytest.approx(truth(claimed), abs=0.09)


# ------------------------------------------------------------------------------ whole worlds


@dataclass(frozen=True)
class Drawn:
    """A proposal and what would be emitted if all of it were verified."""

    proposal: Proposal
    path: list[int]  # right nodes, from the root down


@dataclass(frozen=True)
class World:
    """Rows, true step cost, true survival of a claimed one, drafting cost and its match rate."""

    rows: int
    cost: Callable[[int], float]
    truth: Callable[[float], float]
    match: float = 0.7
    propose: float = 0.0002

    def draw_row(self, draw: random.Random) -> Drawn:
        """A random tree: mostly chains, sometimes siblings; half of the claims are high."""
        if draw.random() > self.match:
            return Drawn(EMPTY, [])
        parents: list[int] = []
        scores: list[float] = []
        path: list[int] = []
        at = -1
        quality = draw.choice([0.35, 0.9])
        for i in range(draw.randrange(1, 9)):
            parent = i - 1 if i == 0 or draw.random() < 0.8 else draw.randrange(-1, i)
            sibling = parent in parents
            claimed = min(1.0, max(0.02, draw.gauss(quality, 0.15))) * (0.3 if sibling else 1)
            parents.append(parent)
            scores.append((scores[parent] if parent >= 0 else 0.0) + math.log(claimed))
            if parent == at and draw.random() < self.truth(claimed):
                path.append(i)
                at = i
        return Drawn(Proposal(tokens=range(len(parents)), parents=parents, scores=scores), path)

    def emitted(self, drawn: Drawn, keep: object) -> list[int]:
        """Tokens emitted if only kept nodes are verified; a kept path ends with one more token."""
        out = []
        for node in drawn.path:
            out.append(node)
            if not keep[node]:  # type: ignore[index]
                return out
        return [*out, 99]


def throughput(world: World, steps: int, seed: int) -> tuple[float, float, float]:
    """Tokens per second of the policy, of plain decoding, of the best fixed number of nodes."""
    draw = random.Random(seed)
    policy = Policy(StepCosts([(1, 1, 0.010), (1, 16, 0.016)]))
    keys = range(world.rows)
    tokens = seconds = 0.0
    fixed = {n: [0.0, 0.0] for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)}
    for step in range(steps):
        drawn = [world.draw_row(draw) for _ in keys]
        noise = math.exp(draw.gauss(0, 0.05))
        if policy.wants_drafts():
            choice, spent = policy.choose(keys, [d.proposal for d in drawn]), world.propose
            keep = choice.keep
        else:
            choice, spent = policy.skip(keys), 0.0
            keep = [[False] * len(d.proposal.tokens) for d in drawn]
        emitted = [world.emitted(d, k) for d, k in zip(drawn, keep, strict=True)]
        took = world.cost(world.rows + choice.num_nodes) * noise
        policy.observe(choice, emitted, took, spent)
        if step < steps // 5:
            continue  # both sides settled
        tokens += sum(map(len, emitted))
        seconds += took + spent
        nodes = sorted(
            (-d.proposal.scores[i], b, i)
            for b, d in enumerate(drawn)
            for i in range(len(d.proposal.tokens))
        )
        for n, total in fixed.items():
            kept = {(b, i) for _, b, i in nodes[:n]}
            total[0] += sum(
                len(world.emitted(d, [(b, i) in kept for i in range(9)]))
                for b, d in enumerate(drawn)
            )
            total[1] += world.cost(world.rows + min(n, len(nodes))) * noise + world.propose
    plain = world.rows / world.cost(world.rows)
    return tokens / seconds, plain, max(a / b for a, b in fixed.values())


COSTS: dict[str, Callable[[int], float]] = {
    "free": lambda t: 0.005 * (1 + 0.002 * t),
    "cheap": lambda t: 0.016 * (1 + 0.043 * t),
    "dear": lambda t: 0.007 + 0.002 * t,
    "steps": lambda t: 0.006 + 0.003 * math.ceil(t / 8),
    "proportional": lambda t: 0.004 * t,
}
TRUTHS: dict[str, Callable[[float], float]] = {
    "honest": lambda p: p,
    "boasting": lambda p: p**3,
    "modest": math.sqrt,
    "useless": lambda _: 0.02,
}


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("cost", COSTS)
def test_never_behind_plain_decoding_or_the_best_fixed_setting(
    cost: str, truth: str, rows: int
) -> None:
    """>= 0.98 x plain and >= 0.97 x the best fixed number of nodes, whatever costs and scores."""
    world = World(rows, COSTS[cost], TRUTHS[truth])
    policy, plain, fixed = throughput(world, 1500 if rows == 1 else 500, seed=rows)
    assert policy >= 0.98 * plain
    assert policy >= 0.97 * fixed


def test_an_expensive_drafter_that_misses_costs_two_percent_at_most() -> None:
    """Drafting that takes a third of a step and never helps is as good as not loaded."""
    world = World(1, COSTS["free"], TRUTHS["useless"], match=1.0, propose=0.0017)
    policy, plain, _ = throughput(world, 3000, seed=3)
    assert policy >= 0.98 * plain


def test_a_change_of_text_is_followed() -> None:
    """A text that stops copying stops being drafted for, and one that starts is, soon."""
    draw = random.Random(5)
    policy = Policy(StepCosts([(1, 1, 0.010), (1, 16, 0.020)]))
    cost = COSTS["dear"]
    rates = []
    for good in (False, True, False, True):
        world = World(1, cost, TRUTHS["honest" if good else "useless"], match=1.0)
        tokens = seconds = 0.0
        for _ in range(400):
            drawn = world.draw_row(draw)
            choice = policy.choose(["row"], [drawn.proposal])
            emitted = world.emitted(drawn, choice.keep[0])
            took = cost(1 + choice.num_nodes)
            policy.observe(choice, [emitted], took)
            tokens += len(emitted)
            seconds += took
        rates.append(tokens / seconds * cost(1))
    assert min(rates[0], rates[2]) > 0.95
    assert min(rates[1], rates[3]) > 1.2


def test_equal_calls_give_equal_answers() -> None:
    """No clock, no global, no chance: a run can be replayed."""
    runs = [throughput(World(2, COSTS["dear"], TRUTHS["honest"]), 120, 9) for _ in range(2)]
    assert runs[0] == runs[1]
