"""Control: how many proposed nodes a step verifies. Asks `cost.policy`; keeps what it learns.

First version: everything proposed is verified, within the rows' room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.core.tree import Proposal

if TYPE_CHECKING:
    from paceline.core.config import DraftConfig


class Control:
    """Chooses the nodes of a step from the drafter's scores and from measured step times."""

    def __init__(self, config: DraftConfig) -> None:
        self._config = config

    def wants_drafts(self, num_rows: int) -> bool:
        """Whether drafting may pay in this step at all."""
        return num_rows > 0

    def choose(
        self, proposals: Sequence[Proposal], max_depths: Sequence[int]
    ) -> tuple[Proposal, ...]:
        """Prune proposals to what is worth verifying; results stay closed under parents.

        Args:
            proposals: one per row.
            max_depths: most draft tokens on a path that the row has room for.
        """
        return tuple(prune(p, d) for p, d in zip(proposals, max_depths, strict=True))

    def record(self, proposal: Proposal, accepted: Sequence[int]) -> None:
        """Learn from one row: `accepted` are the indices of accepted nodes."""

    def record_step(self, num_rows: int, proposals: Sequence[Proposal], seconds: float) -> None:
        """Learn what a step of this size costs."""


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
