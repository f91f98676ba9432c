"""NoneDrafter: proposes nothing, so decoding is plainly autoregressive.

The baseline of every comparison, on the same decode path as all drafters.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.config import DraftConfig
from paceline.core.tree import EMPTY, Proposal
from paceline.draft.base import DrafterSpec, HostCommit


class NoneDrafter:
    """A `HostDrafter` without proposals or state."""

    def __init__(self, config: DraftConfig) -> None:  # noqa: ARG002 (drafters are built alike)
        self.spec = DrafterSpec(name="none", max_nodes=1, max_depth=0, on_host=True)

    def join(self, row: int, tokens: Sequence[int], num_prompt: int, scope: str) -> None:
        """Nothing is kept."""

    def observe(self, commit: HostCommit) -> None:
        """Nothing is kept."""

    def propose(self, rows: Sequence[int], budgets: Sequence[int]) -> Sequence[Proposal]:  # noqa: ARG002
        """One empty proposal per row."""
        return [EMPTY] * len(rows)

    def leave(self, row: int, *, keep: bool) -> None:
        """Nothing was kept."""
