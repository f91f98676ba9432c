"""Proposers: host drafters and drafter networks behind one face, for the engine.

A *host* proposer gets token lists after each step and returns lists. A *network* proposer observes
inside the step, from the target's tapped features. On a CPU reading a network's tree costs nothing, so
its nodes come as lists too and are pruned by the same policy. On a GPU nobody reads it: there a proposer
has a *grower*, which the step itself asks (`growers.py`).

A *merged* proposer asks several others and folds what they say into one tree (`draft/merged.py`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline.core.tree import Proposal, proposals_of
from paceline.draft.base import Commit, HostCommit
from paceline.draft.best_nodes import best_of
from paceline.engine.growers import Grower, MergedGrower, NetworkGrower
from paceline.engine.wanted import Wanted

if TYPE_CHECKING:
    from paceline.draft.base import Drafter, DrafterSpec, HostDrafter
    from paceline.draft.merged import Merged
    from paceline.engine.sequence import Sequence


class Proposer(Protocol):
    """What the engine asks of any drafter."""

    spec: DrafterSpec
    grower: Grower | None  # asked instead of `propose`, if there is one
    needs_text: bool  # must be told of a step's tokens before it proposes for the next one

    def join(self, sequence: Sequence) -> None:
        """The sequence has just taken its row."""
        ...

    def leave(self, sequence: Sequence, *, finished: bool) -> None:
        """The sequence is about to lose its row."""
        ...

    def propose(self, rows: Seq[int], row_ids: Tensor, budgets: Seq[int]) -> Seq[Proposal]:
        """Draft nodes for these rows, as lists, one per row."""
        ...

    def observe(self, commit: Commit) -> None:
        """What a target pass made final; called inside the step if `observes`."""
        ...

    def tell(self, commit: HostCommit) -> None:
        """What the rows emitted, once the host knows."""
        ...

    @property
    def observes(self) -> bool:
        """Whether `observe` wants to be called."""
        ...


class HostProposer:
    """A `HostDrafter` as a `Proposer`."""

    observes = False
    grower: Grower | None = None

    def __init__(self, drafter: HostDrafter) -> None:
        self._drafter = drafter
        self.spec = drafter.spec
        self.needs_text = drafter.spec.max_nodes > 1

    def join(self, sequence: Sequence) -> None:
        """Give the drafter the row's text so far."""
        self._drafter.join(
            sequence.row, sequence.tokens, sequence.num_prompt, sequence.request.scope
        )

    def leave(self, sequence: Sequence, *, finished: bool) -> None:
        """Let the drafter learn from a finished output."""
        self._drafter.leave(sequence.row, keep=finished)

    def propose(self, rows: Seq[int], row_ids: Tensor, budgets: Seq[int]) -> Seq[Proposal]:  # noqa: ARG002
        """Lists, one per row."""
        return self._drafter.propose(rows, budgets)

    def observe(self, commit: Commit) -> None:
        """Nothing: the host is told later."""

    def tell(self, commit: HostCommit) -> None:
        """Append what was emitted."""
        self._drafter.observe(commit)


class NetworkProposer:
    """A drafter network as a `Proposer`; one that caches nothing has nothing to observe."""

    needs_text = False

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        self._drafter = drafter
        self.spec = drafter.spec
        self.observes = drafter.spec.kv is not None
        self.grower: Grower | None = None if device.type == "cpu" else NetworkGrower(drafter)

    def join(self, sequence: Sequence) -> None:
        """Nothing: what a network knows of a row lies in pages."""

    def leave(self, sequence: Sequence, *, finished: bool) -> None:
        """Nothing: as for `join`."""

    def propose(self, rows: Seq[int], row_ids: Tensor, budgets: Seq[int]) -> Seq[Proposal]:  # noqa: ARG002
        """A tree's nodes as lists: the best of each row."""
        lists = proposals_of(self._drafter.propose(row_ids))
        return [best_of(p, budget) for p, budget in zip(lists, budgets, strict=True)]

    def observe(self, commit: Commit) -> None:
        """Update the draft cache."""
        self._drafter.observe(commit)

    def tell(self, commit: HostCommit) -> None:
        """Nothing: the network has observed already."""


class MergedProposer:
    """Several proposers as one: each drafts and learns as it does alone, and their trees are folded.

    Args:
        merged: how they are folded.
        parts: who proposes, in the order in which ties are decided; one network at most.
        num_rows: most rows of a step.
        device: where a network's tree is.
    """

    def __init__(
        self, merged: Merged, parts: Seq[Proposer], num_rows: int, device: torch.device
    ) -> None:
        self._merged = merged
        self._parts = sorted(parts, key=lambda part: not part.spec.on_host)  # the host's go first
        self.spec = merged.join([part.spec for part in self._parts])
        self._wanted = Wanted()
        self.needs_text = any(part.needs_text for part in self._parts)
        self._observing = [part for part in self._parts if part.observes]
        self.grower: Grower | None = None
        for part in self._parts:
            if part.grower is not None:
                hosts = [p for p in self._parts if p is not part]
                self.grower = MergedGrower(
                    merged, self.spec, hosts, part, self._wanted, num_rows, device
                )

    @property
    def observes(self) -> bool:
        """Whether a part wants to see what a pass made final."""
        return bool(self._observing)

    def join(self, sequence: Sequence) -> None:
        """Let every part know, also one that does not draft for this request."""
        name = sequence.request.params.drafter
        self._wanted.join(sequence.row, None if name == self.spec.name else name)
        for part in self._parts:
            part.join(sequence)

    def leave(self, sequence: Sequence, *, finished: bool) -> None:
        """Let every part know."""
        for part in self._parts:
            part.leave(sequence, finished=finished)
        self._wanted.leave(sequence.row)

    def propose(self, rows: Seq[int], row_ids: Tensor, budgets: Seq[int]) -> Seq[Proposal]:
        """One proposal per row of what all parts, or the one that it wants, propose."""
        said = [self._wanted.ask(part, rows, row_ids, budgets) for part in self._parts]
        together = zip(zip(*said, strict=True), budgets, strict=True)
        return [self._merged.fold(each, budget) for each, budget in together]

    def observe(self, commit: Commit) -> None:
        """Pass on what became final to the parts that watch."""
        for part in self._observing:
            part.observe(commit)

    def tell(self, commit: HostCommit) -> None:
        """Let every part know what was emitted."""
        for part in self._parts:
            part.tell(commit)
