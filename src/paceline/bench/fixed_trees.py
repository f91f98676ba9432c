"""FixedTrees: a drafter that costs nothing, whose trees are there to be verified.

Every step of B rows gets the same chains: of one size for all (`chain`), or of sizes from 1 to a largest
one with a given mean (`uneven`). Tokens and shapes are constants on the device and only the roots are new,
so a step takes what the target takes, and can be captured as a network's can. No cache, no taps.

`uneven`: over the rows in order of size, the i-th edge lies at i + (mean - 1) * B * (i / B)^(k + 1) with
k = (most - 1) / (mean - 1) - 1, rounded; a row's size is the distance between two edges. That is 1 + (most - 1)
* u^k for u from 0 to 1: many short rows and few long ones, and B * mean nodes in all, whatever B is. Places of
a step get these sizes in the order of the golden ratio's multiples, so long rows are spread among short ones.

Passed in by `paceline bench steps`; no registry knows it.

Letters: B rows, N nodes of the largest tree.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.tree import DraftTree, Proposal, from_proposals
from paceline.draft.base import DrafterSpec

if TYPE_CHECKING:
    from paceline.draft.base import Commit, DraftRuntime

SOURCE = 4  # in `DraftTree.sources`, as a network's
_GOLDEN = 0.6180339887498949
_APART = 7_919  # between the tokens of neighbouring nodes


def sizes(num_rows: int, mean: int, most: int) -> list[int]:
    """Nodes of each row of a step, root included: 1 to `most`, `num_rows` times `mean` in all.

    Args:
        num_rows: B, at least 1.
        mean: 1 to `most`.
        most: of a row.
    """
    if mean in {1, most}:
        return [mean] * num_rows
    power = (most - 1) / (mean - 1)

    def edge(i: int) -> int:
        return i + round((mean - 1) * num_rows * math.pow(i / num_rows, power))

    rising = [edge(i + 1) - edge(i) for i in range(num_rows)]
    places = sorted(range(num_rows), key=lambda i: i * _GOLDEN % 1.0)
    found = dict(zip(places, rising, strict=True))
    return [found[i] for i in range(num_rows)]


class FixedTrees:
    """A `Drafter` of constant chains.

    Args:
        name: how it was asked for.
        mean: nodes of a row on average, root included.
        most: N; `mean`: all rows have as many.
        vocab_size: of the target; tokens are below it.
        device: where trees are.
    """

    def __init__(
        self, name: str, *, mean: int, most: int, vocab_size: int, device: torch.device
    ) -> None:
        self.spec = DrafterSpec(
            name=name,
            max_nodes=most,
            max_depth=most - 1,
            on_host=False,
            source=SOURCE,
            mean_nodes=mean,
        )
        self._vocab_size, self._device = vocab_size, device
        self._made: dict[int, DraftTree] = {}  # by B; a captured step keeps the one it saw

    def attach(self, runtime: DraftRuntime) -> None:
        """See `Drafter`."""
        self._runtime = runtime

    def observe(self, commit: Commit) -> None:
        """Nothing: without a cache nobody asks."""

    @torch.inference_mode()
    def propose(self, rows: Tensor) -> DraftTree:
        """See `Drafter`."""
        count = rows.shape[0]
        if count not in self._made:
            self._made[count] = self._make(count)
        made = self._made[count]
        roots = self._runtime.next_token(rows).unsqueeze(1)
        return replace(made, token_ids=torch.cat((roots, made.token_ids[:, 1:]), dim=1))

    def _make(self, count: int) -> DraftTree:
        """The trees of so many rows, with roots to be replaced."""
        assert self.spec.mean_nodes is not None, "said above"
        proposals = []
        for row, size in enumerate(sizes(count, self.spec.mean_nodes, self.spec.max_nodes)):
            nodes = range(size - 1)
            first = row * self.spec.max_nodes
            proposals.append(
                Proposal(
                    tokens=[(first + i) * _APART % self._vocab_size for i in nodes],
                    parents=[i - 1 for i in nodes],
                    scores=[-1.0 - i for i in nodes],
                    sources=[SOURCE] * len(nodes),
                )
            )
        return from_proposals([0] * count, proposals).to(self._device)
