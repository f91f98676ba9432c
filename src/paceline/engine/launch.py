"""Launcher: starts the step that a plan describes and says where its results will be.

Proposes, builds the tree, runs the step's device program and starts the copy of its results; it reads
nothing back. What the results mean is `engine.py`'s business.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from paceline.core.batch import ForwardMode
from paceline.core.meanwhile import Meanwhile, nothing
from paceline.core.tree import EMPTY, from_proposals, proposals_of, root
from paceline.draft.best_nodes import best_of
from paceline.engine.control import Control, Drafted, prune
from paceline.engine.graph_keys import Ladder, Trees
from paceline.engine.graphs import CudaRecorder, GraphCache
from paceline.engine.guides import any_of, forced_of, masks_of, shaped
from paceline.engine.plan import StepPlan
from paceline.engine.sequence import Phase
from paceline.engine.step import block_step, extend_step
from paceline.engine.step_tensors import StepTensors

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from paceline.core.stages import Stages
    from paceline.core.tree import DraftTree, Proposal
    from paceline.engine.build import Parts
    from paceline.engine.graphs import Recorder
    from paceline.engine.guides import Guide


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A launched step whose results the host has not read."""

    plan: StepPlan
    tensors: StepTensors | None
    drafted: Drafted | None = None  # BLOCK
    started: float = 0.0  # perf_counter seconds, after drafting
    propose_seconds: float = 0.0
    ready: torch.cuda.Event | None = None  # the tensors are on the host once it has passed


class Launcher:
    """Launches steps. One per engine."""

    def __init__(self, parts: Parts, control: Control, stages: Stages) -> None:
        self._rows = parts.rows
        self._target = parts.target
        self._proposer = parts.proposer
        self._observe = parts.proposer.observe if parts.proposer.observes else None
        self._control = control
        self._alarm = parts.alarm
        self._walk = parts.walk
        self._stages = stages
        self.graphs: GraphCache | None = None
        if parts.device.type == "cuda" and parts.config.graphs != "off":
            self.graphs = graphs_of(parts, CudaRecorder(parts.device))

    def launch(self, plan: StepPlan, meanwhile: Meanwhile = nothing) -> Pending:
        """Start the step; its rows have a step in flight until the result is read.

        Args:
            plan: the step.
            meanwhile: see `core.meanwhile`.
        """
        self._rows.apply()
        if plan.mode is ForwardMode.EXTEND:
            picking = [c.sequence.guide for c in plan.chunks if c.picks]
            tensors = extend_step(
                plan.chunks,
                self._rows,
                self._target,
                self._stages,
                self._observe,
                self._masks(picking, [EMPTY] * len(picking)),
                meanwhile,
            )
            for chunk in plan.chunks:
                chunk.sequence.num_cached = chunk.start + chunk.count
                if chunk.final:
                    chunk.sequence.phase = Phase.DECODE
                if chunk.picks:
                    chunk.sequence.in_flight += 1
            return self._copied(Pending(plan=plan, tensors=tensors))
        host_rows = [s.row for s in plan.sequences]
        self._rows.num_pages = self._rows.bound(max(len(s.pages) for s in plan.sequences))
        asked = time.perf_counter()
        if self.graphs is None:
            row_ids = self._row_ids(host_rows)
            with self._stages("propose"):
                drafted = self._propose(plan, host_rows, row_ids)
            started = time.perf_counter()
            tree, num_tokens = self._tree(plan, drafted, row_ids)
            tensors = self._eager(plan, drafted, host_rows, row_ids, tree, num_tokens, meanwhile)
        else:
            drafted = self._propose(plan, host_rows, torch.empty(0, dtype=torch.int64))
            started = time.perf_counter()
            if drafted.read:
                self.graphs.pass_by(host_rows, self._rows.num_pages)
                tensors = None
            else:
                tensors = self._captured(self.graphs, plan, drafted, host_rows)
            if tensors is None:
                row_ids = self._row_ids(host_rows)
                tree, num_tokens = self._tree(plan, drafted, row_ids)
                tensors = self._eager(
                    plan, drafted, host_rows, row_ids, tree, num_tokens, meanwhile
                )
            else:
                meanwhile()
        for sequence in plan.sequences:
            sequence.in_flight += 1
        return self._copied(
            Pending(
                plan=plan,
                tensors=tensors,
                drafted=drafted,
                started=started,
                propose_seconds=started - asked,
            )
        )

    def _row_ids(self, host_rows: list[int]) -> torch.Tensor:
        return torch.tensor(host_rows, dtype=torch.int64, device=self._rows.device)

    def _eager(
        self,
        plan: StepPlan,
        drafted: Drafted,
        host_rows: list[int],
        row_ids: torch.Tensor,
        tree: DraftTree,
        num_tokens: int,
        meanwhile: Meanwhile,
    ) -> StepTensors:
        """Run a step operation by operation."""
        guides = plan.guides
        along = self.graphs is None and self._rows.device.type == "cpu" and any_of(guides)
        allowed = None if along else self._masks(guides, drafted.proposals)
        return block_step(
            tree,
            row_ids,
            torch.tensor(plan.budgets, dtype=torch.int64, device=self._rows.device),
            num_tokens,
            self._rows.num_pages,
            host_rows,
            self._rows,
            self._target,
            self._stages,
            self._observe,
            self._walk,
            allowed,
            guides if along else (),
            meanwhile,
        )

    def _captured(
        self, graphs: GraphCache, plan: StepPlan, drafted: Drafted, host_rows: list[int]
    ) -> StepTensors | None:
        """Launch the step's graph, if it has one."""
        num_pages = self._rows.num_pages
        if drafted.grown:
            return graphs.launch(Trees.GROWN, host_rows, num_pages, caps=plan.budgets)
        allowed = self._masks(plan.guides, drafted.proposals)
        if not any(p.tokens for p in drafted.proposals):
            return graphs.launch(Trees.ROOT, host_rows, num_pages, allowed=allowed)
        return graphs.launch(
            Trees.GIVEN,
            host_rows,
            num_pages,
            roots=[s.tokens[-1] for s in plan.sequences],
            proposals=drafted.proposals,
            allowed=allowed,
        )

    def _masks(self, guides: Seq[Guide | None], proposals: Seq[Proposal]) -> torch.Tensor | None:
        """What the grammars allow at each node [T, W] int32, on its way to the device; None: all."""
        if not any_of(guides):
            return None
        device, vocab_size = self._rows.device, self._rows.options.vocab_size
        with self._stages("masks"):
            words = masks_of(guides, proposals, vocab_size, pinned=device.type == "cuda")
            return words.to(device, non_blocking=True)

    def _copied(self, pending: Pending) -> Pending:
        """On a GPU: start copying the results to the host. Nothing waits here."""
        if pending.tensors is None or self._rows.device.type == "cpu":
            return pending
        drafted = pending.drafted
        shown = any(s.request.shows_trees for s in pending.plan.sequences)
        tensors = pending.tensors.to_host(
            with_trees=shown and drafted is not None and drafted.grown
        )
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return replace(pending, tensors=tensors, ready=ready)

    def _propose(self, plan: StepPlan, host_rows: list[int], row_ids: torch.Tensor) -> Drafted:
        """What the drafter proposes, pruned to what is worth verifying where the host can see it."""
        keys = [s.request.id for s in plan.sequences]
        depths = [s.room - 1 for s in plan.sequences]
        guides = plan.guides
        wanted = self._control.wants_drafts()
        if not any(plan.budgets) or not (wanted or self._alarm.wants_evidence()):
            forced = forced_of(guides, plan.budgets) if any_of(guides) else []
            if self._control.wants_plain() or not any(p.tokens for p in forced):
                return self._control.skip(keys)
            return self._control.choose(keys, forced, depths)
        if self._proposer.grower is not None:
            self._proposer.grower.stage(host_rows, plan.budgets)
            if not any_of(guides):
                return Drafted(proposals=(EMPTY,) * len(keys), grown=True)
            found = shaped(guides, self._read(host_rows, plan.budgets), plan.budgets)
            fitting = tuple(prune(p, depth) for p, depth in zip(found, depths, strict=True))
            return Drafted(proposals=fitting, read=True, offered=fitting)
        proposals = self._proposer.propose(host_rows, row_ids, plan.budgets)
        if not wanted:
            return replace(self._control.skip(keys), offered=tuple(proposals), aside=True)
        if any_of(guides):
            proposals = shaped(guides, proposals, plan.budgets)
        return self._control.choose(keys, proposals, depths)

    def _read(self, host_rows: list[int], budgets: Seq[int]) -> list[Proposal]:
        """Trees that the device grows, brought to the host: a grammar has to see them."""
        assert self._proposer.grower is not None, "who grows trees"
        grown = self._proposer.grower.grow(self._row_ids(host_rows))
        lists = proposals_of(grown.to(torch.device("cpu")))
        return [best_of(p, budget) for p, budget in zip(lists, budgets, strict=True)]

    def _tree(
        self, plan: StepPlan, drafted: Drafted, row_ids: torch.Tensor
    ) -> tuple[DraftTree, int]:
        """The tree to verify and the number of tokens, roots included."""
        if drafted.grown:
            assert self._proposer.grower is not None, "who grows trees"
            with self._stages("propose"):
                grown = self._proposer.grower.grow(row_ids)
            spec, most = self._proposer.spec, len(plan.budgets) + sum(plan.budgets)
            return grown, min(most, len(plan.budgets) * (spec.mean_nodes or spec.max_nodes))
        total = len(plan.budgets) + sum(len(p.tokens) for p in drafted.proposals)
        if total == len(plan.budgets):
            return root(self._rows.next_token[row_ids]), total
        tree = from_proposals([s.tokens[-1] for s in plan.sequences], drafted.proposals)
        return (tree if self._rows.device.type == "cpu" else tree.to(self._rows.device)), total


def graphs_of(parts: Parts, recorder: Recorder) -> GraphCache:
    """Graphs of an engine's block steps."""
    rows, proposer = parts.rows, parts.proposer
    spec = proposer.spec
    kinds = [Trees.ROOT]
    if parts.config.draft.num_speculative_tokens and spec.max_nodes > 1:
        kinds.append(Trees.GIVEN if proposer.grower is None else Trees.GROWN)
    return GraphCache(
        rows,
        parts.target,
        proposer,
        ladder=Ladder(
            num_rows=parts.config.cache.max_rows,
            max_nodes=spec.max_nodes,
            grown_nodes=spec.mean_nodes or spec.max_nodes,
            max_pages=rows.pages.tensor.shape[1],
            page_size=rows.page_size,
        ),
        kinds=kinds,
        recorder=recorder,
        walk=parts.walk,
        set_aside=parts.graph_bytes,
    )
