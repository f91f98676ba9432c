"""GraphCache: a block step as one device program, captured once and replayed; the only place that captures.

Propose, select, verify, walk, move, commit and observe have fixed shapes and read nothing back, so on a
GPU a whole step, drafter included, is one graph launch. What changes from step to step lies at places
that never move: row ids, draft caps, the trees of host drafters; all else is the rows' own state. A key
says what has to be another graph: where the trees come from, how many rows (padded by the spare row,
which is never live), how many tokens are verified, how many pages a row may have, which sampling options
are computed.

    trees   root    plain decoding; a drafter network observes all the same
            grown   made by the step itself (a drafter network, alone or merged)
            given   made by the host (n-gram, suffix)

Who records and replays is a `Recorder`: CUDA graphs here, a plain call in tests, so that padding and
places are tested where there is no GPU.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline.core.stages import silent
from paceline.core.tree import root
from paceline.engine.step import StepTensors, Walk, block_step
from paceline.engine.tree_places import TreePlaces
from paceline.ops.triton.sizes import power_of_two

if TYPE_CHECKING:
    from paceline.core.tree import DraftTree, Proposal
    from paceline.engine.proposers import Proposer
    from paceline.engine.rows import RowTable
    from paceline.engine.runner import ModelRunner

log = logging.getLogger(__name__)

_LEAST_PAGES = 64
_WARM_UPS = 2
Step = Callable[[], StepTensors]


class Trees(enum.Enum):
    """Where a step's trees come from."""

    ROOT = "root"
    GROWN = "grown"
    GIVEN = "given"


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a captured step was made for."""

    trees: Trees
    rows: int  # padded
    tokens: int  # verified, roots included
    pages: int  # padded
    options: int  # word of the sampling options in play
    num_logprobs: int


class Recorded(Protocol):
    """A step that can be launched again."""

    def replay(self) -> StepTensors:
        """Launch it; the results are overwritten by the next launch, copy them on the same stream."""
        ...


class Recorder(Protocol):
    """Makes a step launchable as a whole."""

    def record(self, step: Step) -> Recorded:
        """Record a step; it may run meanwhile."""
        ...


class GraphCache:
    """Records steps on first use and replays them afterwards.

    Args:
        rows: the row table.
        target: the target network.
        proposer: the drafter.
        num_rows: most rows of a step.
        recorder: who records.
        walk: how far the target's tokens go along the trees.

    Attributes:
        num_eager: block steps that had no graph.
        num_captured: graphs so far.
        capture_seconds: what making them took.
    """

    def __init__(
        self,
        rows: RowTable,
        target: ModelRunner,
        proposer: Proposer,
        *,
        num_rows: int,
        recorder: Recorder,
        walk: Walk,
    ) -> None:
        self._rows = rows
        self._walk = walk
        self._target = target
        self._grower = proposer.grower
        self._observe = proposer.observe if proposer.observes else None
        self._max_nodes = proposer.spec.max_nodes
        self._grown_nodes = proposer.spec.mean_nodes or self._max_nodes  # of a row, on average
        self._ladder = ladder(num_rows)
        self._spare = num_rows
        self._recorder = recorder
        self._given = TreePlaces(num_rows, self._max_nodes, rows.device)
        self._inputs: dict[int, _Inputs] = {}  # by padded rows
        self._graphs: dict[GraphKey, Recorded] = {}
        self._too_large: set[GraphKey] = set()
        self.num_eager = 0
        self.capture_seconds = 0.0

    @property
    def num_captured(self) -> int:
        """Graphs so far."""
        return len(self._graphs)

    def launch(
        self,
        trees: Trees,
        host_rows: list[int],
        num_pages: int,
        *,
        caps: Sequence[int] = (),
        roots: Sequence[int] = (),
        proposals: Sequence[Proposal] = (),
    ) -> StepTensors | None:
        """Launch a step of these rows; None if no graph of it can be made, which is counted.

        Args:
            trees: where they come from; what `Grower.stage` brings has been staged.
            host_rows: the rows.
            num_pages: of a row that the step may look at.
            caps: GROWN: most draft nodes of each row.
            roots: GIVEN: the rows' next tokens.
            proposals: GIVEN: one for each row.
        """
        padded = next(n for n in self._ladder if n >= len(host_rows))
        widest = self._rows.pages.tensor.shape[1]
        drafted = sum(len(p.tokens) for p in proposals)
        key = GraphKey(
            trees=trees,
            rows=padded,
            tokens=self._tokens(trees, padded, drafted),
            pages=min(max(_LEAST_PAGES, power_of_two(num_pages)), widest),
            options=self._rows.options.in_play(host_rows),
            num_logprobs=self._rows.options.num_logprobs(host_rows),
        )
        if key.rows not in self._inputs:
            self._inputs[key.rows] = _Inputs(key.rows, self._spare, self._rows.device)
        inputs = self._inputs[key.rows]
        recorded = self._graphs.get(key) or self._record(key, inputs, host_rows)
        if recorded is None:
            self.num_eager += 1
            return None
        if trees is Trees.GIVEN:
            self._given.write(roots, proposals)
            caps = [len(p.tokens) for p in proposals]
        inputs.write(host_rows, caps)
        return recorded.replay().first(len(host_rows))

    def _tokens(self, trees: Trees, rows: int, drafted: int) -> int:
        """Tokens of a padded step: all that may be grown, or the next rung above what was given."""
        if trees is Trees.ROOT:
            return rows
        if trees is Trees.GROWN:
            return rows * self._grown_nodes
        return min(rows * power_of_two(-(-(rows + drafted) // rows)), rows * self._max_nodes)

    def _record(self, key: GraphKey, inputs: _Inputs, host_rows: list[int]) -> Recorded | None:
        """Record a step over spare rows: nothing of anybody's state changes. None: no memory for it."""
        if key in self._too_large:
            return None
        started = time.perf_counter()
        inputs.write([], [])

        def step() -> StepTensors:
            self._rows.num_pages = key.pages
            return block_step(
                self._tree(key.trees, inputs.row_ids),
                inputs.row_ids,
                inputs.caps,
                key.tokens,
                key.pages,
                host_rows,
                self._rows,
                self._target,
                silent,
                self._observe,
                self._walk,
            ).joined()

        try:
            recorded = self._graphs[key] = self._recorder.record(step)
        except torch.OutOfMemoryError:
            self._too_large.add(key)
            log.warning(
                "no memory is left to capture %s (%d graphs hold some already), so steps like it run "
                "without a graph, slower; outputs are the same. Give the KV pool less (memory_gb), "
                "allow fewer rows (max_rows) or draft nodes, or leave graphs out (graphs off)",
                key,
                len(self._graphs),
            )
            return None
        self.capture_seconds += time.perf_counter() - started
        log.info("captured %s after %.1f s", key, time.perf_counter() - started)
        return recorded

    def _tree(self, trees: Trees, row_ids: Tensor) -> DraftTree:
        if trees is Trees.GIVEN:
            return self._given.first(row_ids.shape[0])
        if trees is Trees.GROWN:
            assert self._grower is not None, "who does not grow trees gives them"
            return self._grower.grow(row_ids)
        return root(self._rows.next_token[row_ids])


class _Inputs:
    """Row ids and caps of a padded step, at places that never move."""

    def __init__(self, num_rows: int, spare: int, device: torch.device) -> None:
        self._spare = spare
        self._written: tuple[list[int], list[int]] | None = None
        both = torch.zeros(2, num_rows, dtype=torch.int64, device=device)
        self._both = both
        self.row_ids, self.caps = both[0], both[1]  # [B] int64

    def write(self, rows: Sequence[int], caps: Sequence[int]) -> None:
        """Set the first places; the others are padding. What stands there already is not sent again."""
        lacking = self.row_ids.shape[0] - len(rows)
        filled = [*caps] or [0] * len(rows)
        both = [*rows] + [self._spare] * lacking, filled + [0] * lacking
        if both == self._written:
            return
        self._written = both
        values = torch.tensor(both, dtype=torch.int64, pin_memory=self._both.is_cuda)
        self._both.copy_(values, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CudaGraph:
    """A CUDA graph and where its results are."""

    graph: torch.cuda.CUDAGraph
    tensors: StepTensors

    def replay(self) -> StepTensors:
        """See `Recorded`."""
        self.graph.replay()
        return self.tensors


class CudaRecorder:
    """Captures CUDA graphs, all in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, step: Step) -> Recorded:
        """See `Recorder`."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            tensors = step()
        return _CudaGraph(graph=graph, tensors=tensors)


def ladder(num_rows: int) -> list[int]:
    """Padded row counts: powers of two, and the capacity itself."""
    sizes = [1]
    while sizes[-1] < num_rows:
        sizes.append(min(2 * sizes[-1], num_rows))
    return sizes
