"""Growers: draft trees made on the device, inside the step, where the host reads nothing of them.

`stage` is the host's turn, before the step is launched; `grow` is part of the step's device program and
can be captured in a graph. What `stage` brings goes to places of a fixed shape.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline.engine.tree_places import TreePlaces

if TYPE_CHECKING:
    from paceline.core.tree import DraftTree, Proposal
    from paceline.draft.base import Drafter, DrafterSpec
    from paceline.draft.merged import Merged


class Grower(Protocol):
    """Who makes the trees of a step on the device."""

    def stage(self, rows: Seq[int], budgets: Seq[int]) -> None:
        """Bring to the device what the host has to say about these rows; nobody waits for it."""
        ...

    def grow(self, row_ids: Tensor) -> DraftTree:
        """The trees of rows [B] int64: those that were staged, in their order, then padding."""
        ...


class Lists(Protocol):
    """A part of a merged drafter that proposes on the host."""

    spec: DrafterSpec

    def propose(self, rows: Seq[int], row_ids: Tensor, budgets: Seq[int]) -> Seq[Proposal]:
        """Draft nodes as lists, one per row."""
        ...


class NetworkGrower:
    """A network's own tree."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def stage(self, rows: Seq[int], budgets: Seq[int]) -> None:
        """Nothing: a network reads the rows' state where it is."""

    def grow(self, row_ids: Tensor) -> DraftTree:
        """See `Grower`."""
        return self._drafter.propose(row_ids)


class MergedGrower:
    """The fold of what parts on the host propose and of a network's tree.

    Args:
        merged: how they are folded.
        spec: of the whole.
        hosts: the parts on the host, in the order in which ties are decided.
        network: comes after them.
        num_rows: most rows of a step.
        device: where the network's tree is.
    """

    def __init__(
        self,
        merged: Merged,
        spec: DrafterSpec,
        hosts: Seq[Lists],
        network: Grower,
        num_rows: int,
        device: torch.device,
    ) -> None:
        self._merged = merged
        self._max_depth = spec.max_depth
        self._network = network
        self._hosts = [(h, TreePlaces(num_rows, h.spec.max_nodes, device)) for h in hosts]

    def stage(self, rows: Seq[int], budgets: Seq[int]) -> None:
        """See `Grower`."""
        nobody = torch.empty(0, dtype=torch.int64)  # a part on the host asks for no ids on a device
        for part, places in self._hosts:
            # What they say of the root is not looked at: the network reads it where it is.
            places.write([0] * len(rows), part.propose(rows, nobody, budgets))
        self._network.stage(rows, budgets)

    def grow(self, row_ids: Tensor) -> DraftTree:
        """See `Grower`."""
        grown = self._network.grow(row_ids)
        trees = [places.first(row_ids.shape[0]) for _, places in self._hosts]
        return self._merged.fold_trees(grown.token_ids[:, 0], [*trees, grown], self._max_depth)
