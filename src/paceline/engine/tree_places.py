"""TreePlaces: memory of a fixed shape for trees that the host makes and a captured step reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from paceline.core.tree import EMPTY, DraftTree, Proposal
from paceline.draft.merged import padded_tree

if TYPE_CHECKING:
    from torch import Tensor


class TreePlaces:
    """One tree of up to N nodes for each of R rows; the memory never moves.

    Args:
        num_rows: R.
        max_nodes: N, root included.
        device: of the memory.
    """

    def __init__(self, num_rows: int, max_nodes: int, device: torch.device) -> None:
        self._max_nodes = max_nodes
        self._tree = _with_roots([0] * num_rows, [EMPTY] * num_rows, max_nodes).to(device)

    def write(self, roots: Sequence[int], proposals: Sequence[Proposal]) -> None:
        """Put trees into the first places; on a GPU the copy is started, and nobody waits for it.

        Args:
            roots: the rows' next tokens.
            proposals: one for each.
        """
        made = _with_roots(roots, proposals, self._max_nodes)
        for field in fields(DraftTree):
            place: Tensor = getattr(self._tree, field.name)
            values: Tensor = getattr(made, field.name)
            if place.is_cuda:
                values = values.pin_memory()
            place[: len(roots)].copy_(values, non_blocking=True)

    def first(self, count: int) -> DraftTree:
        """The trees of the first `count` places: views, always the same memory.

        What was written last may have been fewer; the others hold older trees.
        """
        return DraftTree(**{f.name: getattr(self._tree, f.name)[:count] for f in fields(DraftTree)})


def _with_roots(roots: Sequence[int], proposals: Sequence[Proposal], max_nodes: int) -> DraftTree:
    tree = padded_tree(proposals, max_nodes)
    tree.token_ids[:, 0] = torch.tensor(roots, dtype=torch.int64)
    return tree
