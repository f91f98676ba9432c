"""Proposers: host drafters and drafter networks behind one face, for the engine.

A *host* proposer gets token lists after each step and returns lists. A *network* proposer observes
inside the step, from the target's tapped features, and returns trees that live on the device. On a
CPU reading such a tree costs nothing, so its nodes are pruned by the same policy; on a GPU nobody
reads it, and the nodes are selected on the device.

A *merged* proposer asks several others and folds what they say into one tree (`draft/merged.py`). Where
a network's tree stays on the device, the host's lists go there, before the network is asked, in tensors
of a fixed shape.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline.core.tree import EMPTY, DraftTree, Proposal, proposals_of
from paceline.draft.base import Commit, HostCommit
from paceline.draft.best_nodes import best_of
from paceline.draft.merged import padded_tree

if TYPE_CHECKING:
    from paceline.draft.base import Drafter, DrafterSpec, HostDrafter
    from paceline.draft.merged import Merged
    from paceline.engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """Either lists (a host can prune them) or a tree that stays on the device."""

    proposals: Seq[Proposal]
    tree: DraftTree | None = None


class Proposer(Protocol):
    """What the engine asks of any drafter."""

    spec: DrafterSpec

    def join(self, sequence: Sequence) -> None:
        """The sequence has just taken its row."""
        ...

    def leave(self, sequence: Sequence, *, finished: bool) -> None:
        """The sequence is about to lose its row."""
        ...

    def propose(self, rows: Seq[int], row_ids: Tensor, budgets: Seq[int]) -> Proposed:
        """Draft nodes for these rows."""
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

    def __init__(self, drafter: HostDrafter) -> None:
        self._drafter = drafter
        self.spec = drafter.spec

    def join(self, sequence: Sequence) -> None:
        """Give the drafter the row's text so far."""
        self._drafter.join(
            sequence.row, sequence.tokens, sequence.num_prompt, sequence.request.scope
        )

    def leave(self, sequence: Sequence, *, finished: bool) -> None:
        """Let the drafter learn from a finished output."""
        self._drafter.leave(sequence.row, keep=finished)

    def propose(self, rows: Seq[int], row_ids: Tensor, budgets: Seq[int]) -> Proposed:  # noqa: ARG002
        """Lists, one per row."""
        return Proposed(proposals=self._drafter.propose(rows, budgets))

    def observe(self, commit: Commit) -> None:
        """Nothing: the host is told later."""

    def tell(self, commit: HostCommit) -> None:
        """Append what was emitted."""
        self._drafter.observe(commit)


class NetworkProposer:
    """A drafter network as a `Proposer`."""

    observes = True

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.spec = drafter.spec

    def join(self, sequence: Sequence) -> None:
        """Nothing: what a network knows of a row lies in pages."""

    def leave(self, sequence: Sequence, *, finished: bool) -> None:
        """Nothing: as for `join`."""

    def propose(self, rows: Seq[int], row_ids: Tensor, budgets: Seq[int]) -> Proposed:
        """A tree; as lists too where reading it costs nothing."""
        tree = self._drafter.propose(row_ids)
        if not tree.token_ids.is_cpu:
            return Proposed(proposals=(EMPTY,) * len(rows), tree=tree)
        lists = proposals_of(tree)
        return Proposed(
            proposals=[best_of(p, budget) for p, budget in zip(lists, budgets, strict=True)]
        )

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
    """

    def __init__(self, merged: Merged, parts: Seq[Proposer]) -> None:
        self._merged = merged
        self._parts = sorted(parts, key=lambda part: not part.spec.on_host)  # the host's go first
        self.spec = merged.join([part.spec for part in self._parts])
        self._observing = [part for part in self._parts if part.observes]

    @property
    def observes(self) -> bool:
        """Whether a part wants to see what a pass made final."""
        return bool(self._observing)

    def join(self, sequence: Sequence) -> None:
        """Let every part know."""
        for part in self._parts:
            part.join(sequence)

    def leave(self, sequence: Sequence, *, finished: bool) -> None:
        """Let every part know."""
        for part in self._parts:
            part.leave(sequence, finished=finished)

    def propose(self, rows: Seq[int], row_ids: Tensor, budgets: Seq[int]) -> Proposed:
        """One tree per row of what all parts propose; on a GPU with a network, on the device."""
        if row_ids.is_cpu or self.spec.on_host:
            said = [part.propose(rows, row_ids, budgets).proposals for part in self._parts]
            together = zip(zip(*said, strict=True), budgets, strict=True)
            return Proposed(
                proposals=[self._merged.fold(each, budget) for each, budget in together]
            )
        trees = []
        for part in self._parts:
            proposed = part.propose(rows, row_ids, budgets)
            tree = proposed.tree
            if tree is None:
                tree = _upload(padded_tree(proposed.proposals, part.spec.max_nodes), row_ids.device)
            trees.append(tree)
        roots = trees[-1].token_ids[:, 0]  # the network's: it has read them where they are
        tree = self._merged.fold_trees(roots, trees, self.spec.max_depth)
        return Proposed(proposals=(EMPTY,) * len(rows), tree=tree)

    def observe(self, commit: Commit) -> None:
        """Pass on what became final to the parts that watch."""
        for part in self._observing:
            part.observe(commit)

    def tell(self, commit: HostCommit) -> None:
        """Let every part know what was emitted."""
        for part in self._parts:
            part.tell(commit)


def _upload(tree: DraftTree, device: torch.device) -> DraftTree:
    """Start copying a tree to the device; nobody waits for it."""

    def moved(values: Tensor) -> Tensor:
        pinned = values.pin_memory() if device.type == "cuda" else values
        return pinned.to(device, non_blocking=True)

    return DraftTree(**{f.name: moved(getattr(tree, f.name)) for f in fields(tree)})
