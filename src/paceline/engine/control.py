"""Control: how many proposed nodes a step verifies. Asks `cost.policy`; feeds it what happened.

With `adaptive` off everything that was proposed is verified, within the rows' room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.config import DraftConfig
from paceline.core.tree import EMPTY, Proposal
from paceline.cost.policy import Choice, Policy
from paceline.cost.table import StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """What a step verifies: one proposal per row, and the policy's choice behind it.

    On a GPU a network's trees are grown inside the step, all of each is verified, and `proposals` are
    empty; in a step with a grammar's row the host reads them all the same (`read`).
    """

    proposals: tuple[Proposal, ...]
    grown: bool = False
    read: bool = False
    choice: Choice | None = None  # None: nothing to learn from
    offered: tuple[Proposal, ...] = ()  # one per row, before the choice; empty: nobody was asked
    aside: bool = False  # asked though the policy would not have it; nothing of it is verified


class Control:
    """Chooses the nodes of a step from the drafter's scores and from measured step times."""

    def __init__(self, config: DraftConfig) -> None:
        self._policy = Policy(StepCosts()) if config.adaptive else None

    def wants_drafts(self) -> bool:
        """Whether to ask the drafter in this step at all."""
        return self._policy is None or self._policy.wants_drafts()

    def wants_plain(self) -> bool:
        """Whether this step must verify no draft at all, because plain decoding has to be measured."""
        return self._policy is not None and self._policy.wants_plain()

    def skip(self, keys: Sequence[str]) -> Drafted:
        """A step without drafts, because the drafter was not asked."""
        choice = None if self._policy is None else self._policy.skip(keys)
        return Drafted(proposals=(EMPTY,) * len(keys), choice=choice)

    def choose(
        self, keys: Sequence[str], proposals: Sequence[Proposal], max_depths: Sequence[int]
    ) -> Drafted:
        """Prune proposals to what is worth verifying; results stay closed under parents.

        Args:
            keys: the rows' request ids.
            proposals: one per row.
            max_depths: most draft tokens on a path that each row has room for.
        """
        fitting = tuple(prune(p, d) for p, d in zip(proposals, max_depths, strict=True))
        if self._policy is None:
            return Drafted(proposals=fitting, offered=fitting)
        choice = self._policy.choose(keys, fitting)
        kept = tuple(
            prune(p, d, k) for p, d, k in zip(fitting, max_depths, choice.keep, strict=True)
        )
        return Drafted(proposals=kept, choice=choice, offered=fitting)

    def observe(
        self,
        drafted: Drafted,
        emitted: Sequence[Sequence[int]],
        seconds: float,
        propose_seconds: float,
    ) -> None:
        """Learn from a finished step.

        Args:
            drafted: what was chosen for it.
            emitted: tokens of each row, oldest first.
            seconds: the step without drafting.
            propose_seconds: drafting.
        """
        if self._policy is not None and drafted.choice is not None:
            self._policy.observe(drafted.choice, emitted, seconds, propose_seconds)

    def forget(self, key: str) -> None:
        """A request has ended."""
        if self._policy is not None:
            self._policy.forget(key)


def prune(proposal: Proposal, max_depth: int, keep: Sequence[bool] | None = None) -> Proposal:
    """Drop nodes that are too deep or not kept; parents are renumbered.

    `keep` must be closed under parents.
    """
    depths: list[int] = []
    new_index: list[int] = []
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    sources: list[int] = []
    for i, parent in enumerate(proposal.parents):
        depth = 1 + (depths[parent] if parent >= 0 else 0)
        depths.append(depth)
        if depth > max_depth or (keep is not None and not keep[i]):
            new_index.append(-1)
            continue
        new_index.append(len(tokens))
        tokens.append(proposal.tokens[i])
        parents.append(new_index[parent] if parent >= 0 else -1)
        scores.append(proposal.scores[i])
        if proposal.sources:
            sources.append(proposal.sources[i])
    if len(tokens) == len(proposal.tokens):
        return proposal
    return Proposal(tokens=tokens, parents=parents, scores=scores, sources=sources)
