"""Policy: how many draft nodes the batch verifies in this step, and whether to draft at all.

One budget for the whole batch. Nodes of all rows are ranked by *path survival* S, the probability
that all tokens up to the node are right; taking the best n of them, the step is expected to emit
rows + sum of S tokens in cost(rows, rows + n) seconds. The n with the highest rate wins, n = 0 being
plain decoding. All n are looked at: measured cost curves need not be convex (CaDDTree, arXiv
2606.01813, stops at the first drop). A child's S never exceeds its parent's, so what is chosen is
closed under parents.

Path survival is a product of *conditional* survivals, exp(score - parent's score), each corrected
by two things learned online: the rate at which conditional survivals of that size held (one table
for all), and a factor per row, since requests differ (temperature, text) more than scores know.
Both learn from every emitted token, verified or not (`outcomes.py`).

*Probing.* While nodes are offered but n = 0, every k-th step verifies the best n > 0 anyway, to learn
costs and deep survivals; k doubles from 8 to 256 while probes lose and is 8 again after one that
wins. Drafting has an account: what it saved, less what it took. Overdrawn by two plain steps,
`wants_drafts` says no except for probes; so a drafter that never helps costs a bounded time. It also
says no where plain decoding was not measured for long (4 steps, doubling to 128): a cost that is
never paid cannot be known, and the choice is a comparison with it.

Deterministic: the same calls give the same answers. Not here: the nodes (`draft`), step times
(`table.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.cost.outcomes import judge
from paceline.cost.table import StepCosts, monotone

if TYPE_CHECKING:
    from paceline.core.tree import Proposal

_EDGES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96)  # of conditional survival
_CENTRES = (0.02, 0.075, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93, 0.985)
_PRIOR_WEIGHT = 8.0  # judged nodes that the factor for all claims is worth
_MEMORY = 500.0  # judged nodes after which a class forgets half
_KEPT = 0.998  # of what all claims were worth, per judged node
_ROW_WEIGHT = 6.0  # expected hits that "claims are honest", "this row is like others" are worth
_ROW_MEMORY = 0.97  # kept per judged step
_MARGIN = 0.01  # by which drafting must beat plain decoding
_CLEARLY = 1.1  # times what a probe cost must be won by it
_FIRST_WAIT, _LAST_WAIT = 8, 256
_FIRST_PLAIN, _LAST_PLAIN = 4, 128
_CREDIT = 2.0  # plain steps that drafting may lose, and save up


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What one step verifies, and what was known when it was chosen. `Policy.observe` wants it back."""

    keys: Sequence[Hashable]
    proposals: Sequence[Proposal]
    keep: Sequence[Sequence[bool]]  # per row and proposed node; closed under parents
    num_nodes: int  # kept nodes of all rows; the step has len(keys) + num_nodes tokens
    expected_tokens: float  # emitted by the whole batch
    expected_seconds: float
    plain_seconds: float  # what the step would take without draft nodes
    drafted: bool  # the drafter was asked
    probe: bool = False


class Calibration:
    """Conditional survival by what the score claims it is: monotone, learned, forgetful.

    Two levels: one factor for all claims, learned within a few nodes, and a rate per class of
    claims, which starts out as the claim times that factor.
    """

    def __init__(self) -> None:
        self._right = [0.0] * len(_CENTRES)
        self._seen = [0.0] * len(_CENTRES)
        self._all_right = self._all_claimed = 0.0
        self._rates = list(_CENTRES)
        self._stale = False

    def learn(self, claimed: float, right: bool) -> None:
        """Judge one node whose parent was right."""
        self._all_right = self._all_right * _KEPT + right
        self._all_claimed = self._all_claimed * _KEPT + claimed
        i = bisect_right(_EDGES, claimed)
        if self._seen[i] >= _MEMORY:
            self._right[i] /= 2
            self._seen[i] /= 2
        self._right[i] += right
        self._seen[i] += 1
        self._stale = True

    def chance(self, claimed: float) -> float:
        """What a claimed conditional survival in [0, 1] is worth, in [0, 1]."""
        if self._stale:
            self._rates = self._learned()
            self._stale = False
        i = bisect_right(_CENTRES, claimed)
        if i == 0:
            return self._rates[0] * claimed / _CENTRES[0]
        low, below = _CENTRES[i - 1], self._rates[i - 1]
        if i == len(_CENTRES):
            return min(1.0, below * claimed / low)
        return below + (self._rates[i] - below) * (claimed - low) / (_CENTRES[i] - low)

    def _learned(self) -> list[float]:
        factor = (self._all_right + _ROW_WEIGHT) / (self._all_claimed + _ROW_WEIGHT)
        weights = [n + _PRIOR_WEIGHT for n in self._seen]
        return monotone(
            [
                (right + min(1.0, factor * claimed) * _PRIOR_WEIGHT) / weight
                for right, claimed, weight in zip(self._right, _CENTRES, weights, strict=True)
            ],
            weights,
        )


class Policy:
    """Chooses the nodes of each step; see the module.

    Args:
        costs: measured step times; `observe` feeds it.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.calibration = Calibration()
        self._rows: dict[Hashable, tuple[float, float]] = {}  # right, expected
        self._wait = self._left = _FIRST_WAIT
        self._paying = True
        self._account = 0.0  # plain steps saved by drafting, bounded both ways
        self._plain_wait = _FIRST_PLAIN
        self._unmeasured = 0  # steps since the last plain one

    def wants_drafts(self) -> bool:
        """Whether to ask the drafter in this step.

        Yes if drafting pays or a probe is due, unless plain decoding has to be measured.
        """
        return not self.wants_plain() and (self._paying or self._left <= 0)

    def wants_plain(self) -> bool:
        """Whether this step has to measure plain decoding."""
        return self._unmeasured >= self._plain_wait

    def skip(self, keys: Sequence[Hashable]) -> Choice:
        """The choice of a step whose drafter was not asked: plain decoding.

        Args:
            keys: the rows' names, hashable and lasting as long as a request.
        """
        plain = self.costs.seconds(len(keys), len(keys))
        return Choice(
            keys=keys,
            proposals=(),
            keep=((),) * len(keys),
            num_nodes=0,
            expected_tokens=float(len(keys)),
            expected_seconds=plain,
            plain_seconds=plain,
            drafted=False,
        )

    def choose(self, keys: Sequence[Hashable], proposals: Sequence[Proposal]) -> Choice:
        """Choose among proposed nodes.

        Args:
            keys: the rows' names, hashable and lasting as long as a request.
            proposals: one per row; only nodes that the row has room for.
        """
        rows = len(keys)
        nodes: list[tuple[float, int, int]] = []
        for b, (key, proposal) in enumerate(zip(keys, proposals, strict=True)):
            nodes += [(-s, b, i) for i, s in enumerate(self._survival(key, proposal))]
        nodes.sort()
        seconds = self.costs.curve(rows, len(nodes))
        probe = False
        best, tokens = 0, float(rows)
        best_rate = tokens / seconds[0] * (1.0 + _MARGIN)
        some, some_rate, expected = 0, -1.0, tokens
        for n, (loss, _, _) in enumerate(nodes, start=1):
            expected -= loss
            rate = expected / seconds[n]
            if rate > some_rate:
                some, some_rate = n, rate
            if rate > best_rate:
                best, best_rate, tokens = n, rate, expected
        if nodes and not best and self._left <= 0:
            best, probe = some, True
            tokens = rows - sum(loss for loss, _, _ in nodes[:best])
        keep = [[False] * len(p.tokens) for p in proposals]
        for _, b, i in nodes[:best]:
            keep[b][i] = True
        return Choice(
            keys=keys,
            proposals=proposals,
            keep=keep,
            num_nodes=best,
            expected_tokens=tokens,
            expected_seconds=seconds[best],
            plain_seconds=seconds[0],
            drafted=True,
            probe=probe,
        )

    def observe(
        self,
        choice: Choice,
        emitted: Sequence[Sequence[int]],
        seconds: float,
        propose_seconds: float = 0.0,
    ) -> None:
        """Learn from a finished step.

        Args:
            choice: what was chosen for it.
            emitted: tokens each row emitted, oldest first (empty: the row was aborted).
            seconds: the step without drafting: verify, walk and bookkeeping.
            propose_seconds: drafting; 0 if the drafter was not asked.
        """
        rows = len(choice.keys)
        self.costs.observe(rows, rows + choice.num_nodes, seconds)
        if not choice.drafted and self._unmeasured >= self._plain_wait:
            self._plain_wait = min(2 * self._plain_wait, _LAST_PLAIN)
        self._unmeasured = 0 if choice.num_nodes == 0 else self._unmeasured + 1
        if not choice.drafted:
            self._left -= 1
            return
        for key, proposal, tokens in zip(choice.keys, choice.proposals, emitted, strict=True):
            self._learn(key, proposal, tokens)
        self._weigh(choice, sum(len(t) for t in emitted), propose_seconds)

    def forget(self, key: Hashable) -> None:
        """Drop what was learned about a row whose request has ended."""
        self._rows.pop(key, None)

    def _survival(self, key: Hashable, proposal: Proposal) -> list[float]:
        """Path survival of every node of a row."""
        right, expected = self._rows.get(key, (0.0, 0.0))
        factor = (right + _ROW_WEIGHT) / (expected + _ROW_WEIGHT)
        paths: list[float] = []
        for i, parent in enumerate(proposal.parents):
            chance = min(0.999, factor * self.calibration.chance(_claimed(proposal, i)))
            paths.append(chance * paths[parent] if parent >= 0 else chance)
        return paths

    def _learn(self, key: Hashable, proposal: Proposal, emitted: Sequence[int]) -> None:
        hits = expected = 0.0
        judged = judge(proposal.tokens, proposal.parents, emitted)
        for i, _, right in judged:
            claimed = _claimed(proposal, i)
            expected += self.calibration.chance(claimed)
            hits += right
        for i, _, right in judged:
            self.calibration.learn(_claimed(proposal, i), right)
        if judged:
            before = self._rows.get(key, (0.0, 0.0))
            self._rows[key] = (
                before[0] * _ROW_MEMORY + hits,
                before[1] * _ROW_MEMORY + expected,
            )

    def _weigh(self, choice: Choice, num_emitted: int, propose_seconds: float) -> None:
        """Keep the account of drafting, and the waiting time for the next probe.

        The account books what a choice was expected to save: single outcomes are mostly luck, and
        the expectations themselves are corrected by `_learn`.
        """
        rows = len(choice.keys)
        plain = choice.plain_seconds
        per_token, more = plain / rows, choice.expected_seconds - plain
        expected = max(0.0, (choice.expected_tokens - rows) * per_token - more)
        self._account = min(_CREDIT, self._account + (expected - propose_seconds) / plain)
        won = (num_emitted - rows) * per_token > _CLEARLY * (more + propose_seconds)
        if choice.num_nodes and won:
            self._wait = self._left = _FIRST_WAIT
            if not self._paying:
                self._paying, self._account = True, -_CREDIT / 2
        elif choice.probe or not self._paying:
            self._wait = min(2 * self._wait, _LAST_WAIT)
            self._left = self._wait
        elif not choice.num_nodes and any(p.tokens for p in choice.proposals):
            self._left -= 1
        if self._paying and self._account < -_CREDIT:
            self._paying = False
            self._left = self._wait


def _claimed(proposal: Proposal, node: int) -> float:
    """Conditional survival that the scores claim. NaN is no claim at all: 0."""
    parent = proposal.parents[node]
    score = proposal.scores[node] - (proposal.scores[parent] if parent >= 0 else 0.0)
    return 0.0 if math.isnan(score) else math.exp(min(0.0, score))
