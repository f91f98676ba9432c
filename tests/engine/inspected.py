"""Engines whose every tree and every pass is checked; no tests here.

`check()` reads the device, so service does without. Here the parts that an engine is built from are
exchanged for the same parts with their checks on, for the time of the building.
"""

from __future__ import annotations

import itertools
from unittest import mock

import torch
from torch import Tensor

from paceline.core.batch import ForwardBatch, ForwardOutput
from paceline.core.config import EngineConfig
from paceline.core.meanwhile import Meanwhile, nothing
from paceline.core.tree import DraftTree
from paceline.draft.base import Drafter, DraftNet
from paceline.engine import build
from paceline.engine import engine as module
from paceline.engine.engine import Engine
from paceline.engine.launch import Launcher
from paceline.engine.network_runtime import NetworkRuntime
from paceline.engine.proposers import NetworkProposer
from paceline.engine.runner import ModelRunner


def build_inspected(config: EngineConfig) -> Engine:
    """`Engine.build`, with checks."""
    with (
        mock.patch.object(module, "Launcher", InspectedLauncher),
        mock.patch.object(build, "ModelRunner", InspectedRunner),
        mock.patch.object(build, "NetworkRuntime", InspectedRuntime),
        mock.patch.object(build, "NetworkProposer", InspectedProposer),
    ):
        return Engine.build(config)


def check_pass(batch: ForwardBatch, page_size: int) -> None:
    """The batch's own contract, and that each query is written where its row's pages say."""
    batch.check()
    pages, slots, cu_q = batch.pages.tolist(), batch.slots.tolist(), batch.cu_q.tolist()
    for b, (start, stop) in enumerate(itertools.pairwise(cu_q)):
        first = int(batch.prefix_lens[b] + batch.tail_lens[b]) - (stop - start)
        for place, slot in enumerate(slots[start:stop], first):
            page, within = divmod(place, page_size)
            assert slot in {-1, pages[b][page] * page_size + within}, "another place's slot"


class InspectedRunner(ModelRunner):
    """Checks the target's passes."""

    def forward(self, batch: ForwardBatch, meanwhile: Meanwhile = nothing) -> ForwardOutput:
        """See `ModelRunner`."""
        check_pass(batch, self.pool.page_size)
        return super().forward(batch, meanwhile)


class InspectedRuntime(NetworkRuntime):
    """Checks a drafter network's passes."""

    def forward(self, net: DraftNet, batch: ForwardBatch) -> ForwardOutput:
        """See `NetworkRuntime`."""
        assert self._pool is not None
        check_pass(batch, self._pool.page_size)
        return super().forward(net, batch)

    def block(self, rows: Tensor, token_ids: Tensor, mask: Tensor) -> ForwardBatch:
        """See `NetworkRuntime`."""
        batch = super().block(rows, token_ids, mask)
        batch.check()
        return batch


class InspectedProposer(NetworkProposer):
    """Checks a drafter network's trees as they come, before anything is pruned."""

    def __init__(self, drafter: Drafter, device: torch.device) -> None:
        super().__init__(drafter, device)
        propose = drafter.propose

        def checked(rows: Tensor) -> DraftTree:
            tree = propose(rows)
            tree.check()
            assert tree.token_ids.shape[0] == rows.shape[0], "a tree per row"
            assert tree.token_ids.shape[1] <= drafter.spec.max_nodes, "more nodes than promised"
            assert int(tree.depths.max()) <= drafter.spec.max_depth, "deeper than promised"
            return tree

        drafter.propose = checked


class InspectedLauncher(Launcher):
    """Checks the trees that are verified."""

    def _tree(self, *args: object) -> tuple[DraftTree, int]:
        tree, num_tokens = super()._tree(*args)
        tree.check()
        assert num_tokens >= tree.token_ids.shape[0], "a root for each row"
        return tree, num_tokens
