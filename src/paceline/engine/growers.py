"""Growers: draft trees made on the device, inside the step, where the host reads nothing of them.

`stage` is the host's turn, before the step is launched; `grow` is part of the step's device program and
can be captured in a graph. What `stage` brings goes to places of a fixed shape.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline.core.tree import NEG_INF, DraftTree
from paceline.engine.tree_places import TreePlaces

if TYPE_CHECKING:
    from paceline.draft.base import Drafter, DrafterSpec
    from paceline.draft.merged import Merged
    from paceline.engine.wanted import Lists, Wanted


class Grower(Protocol):
    """Who makes the trees of a step on the device."""

    def stage(self, rows: Seq[int], budgets: Seq[int]) -> None:
        """Bring to the device what the host has to say about these rows; nobody waits for it."""
        ...

    def grow(self, row_ids: Tensor) -> DraftTree:
        """The trees of rows [B] int64: those that were staged, in their order, then padding."""
        ...


class Growing(Protocol):
    """A part of a merged drafter that may have a grower."""

    spec: DrafterSpec
    grower: Grower | None


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
        network: has a grower, and comes after them.
        wanted: which rows want which part.
        num_rows: most rows of a step.
        device: where the network's tree is.
    """

    def __init__(
        self,
        merged: Merged,
        spec: DrafterSpec,
        hosts: Seq[Lists],
        network: Growing,
        wanted: Wanted,
        num_rows: int,
        device: torch.device,
    ) -> None:
        assert network.grower is not None, "a network on a device grows"
        self._merged = merged
        self._max_depth = spec.max_depth
        self._network = network.grower
        self._name = network.spec.name
        self._wanted = wanted
        self._grows = torch.ones(num_rows, dtype=torch.bool, device=device)
        self._staged = [True] * num_rows  # what stands there
        self._hosts = [(h, TreePlaces(num_rows, h.spec.max_nodes, device)) for h in hosts]

    def stage(self, rows: Seq[int], budgets: Seq[int]) -> None:
        """See `Grower`."""
        nobody = torch.empty(0, dtype=torch.int64)  # a part on the host asks for no ids on a device
        for part, places in self._hosts:
            # What they say of the root is not looked at: the network reads it where it is.
            said = self._wanted.ask(part, rows, nobody, budgets)
            places.write([0] * len(rows), said)
        grows = [self._wanted.wants(row, self._name) for row in rows]
        if grows != self._staged[: len(rows)]:  # where nobody names a part, never
            self._staged[: len(rows)] = grows
            values = torch.tensor(grows, pin_memory=self._grows.is_cuda)
            self._grows[: len(rows)].copy_(values, non_blocking=True)
        self._network.stage(rows, budgets)

    def grow(self, row_ids: Tensor) -> DraftTree:
        """See `Grower`."""
        grown = self._network.grow(row_ids)
        # A row that does not want the network's tree has it grown all the same: shapes are fixed.
        grows = self._grows[: row_ids.shape[0]].unsqueeze(1)
        grown = replace(grown, scores=torch.where(grows, grown.scores, NEG_INF))
        trees = [places.first(row_ids.shape[0]) for _, places in self._hosts]
        return self._merged.fold_trees(grown.token_ids[:, 0], [*trees, grown], self._max_depth)
