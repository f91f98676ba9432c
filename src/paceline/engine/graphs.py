"""GraphCache: a block step as one device program, captured once and replayed; the only place that captures.

Propose, select, verify, walk, move, commit and observe have fixed shapes and read nothing back, so on a
GPU a whole step, drafter included, is one graph launch. What changes from step to step lies at places
that never move: row ids, draft caps, the trees of host drafters; all else is the rows' own state. A key
(`graph_keys.py`) says what has to be another graph: where the trees come from, how many rows (padded by the
spare row, which is never live), how many tokens are verified, how many pages a row may have, which sampling
options are computed. The usual ones are captured when an engine is built (`beforehand.py`), the others when
the first step asks for them.

Who records and replays is a `Recorder`: CUDA graphs here, a plain call in tests, so that padding and
places are tested where there is no GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline.core.device import free_cached, free_memory, lacks_memory
from paceline.core.stages import silent
from paceline.core.tree import root
from paceline.engine.graph_keys import GraphKey, Ladder, Trees
from paceline.engine.step import Walk, block_step
from paceline.engine.step_tensors import StepTensors
from paceline.engine.tree_places import TreePlaces

if TYPE_CHECKING:
    from paceline.core.tree import DraftTree, Proposal
    from paceline.engine.proposers import Proposer
    from paceline.engine.rows import RowTable
    from paceline.engine.runner import ModelRunner

log = logging.getLogger(__name__)

_GB = 1e9
_WARM_UPS = 2
REMEDY = (
    "Give the KV pool less (memory_gb), allow fewer rows (max_rows) or draft nodes (spec_nodes), or leave "
    "graphs out (graphs off)"
)
Step = Callable[[], StepTensors]


class Recorded(Protocol):
    """A step that can be launched again."""

    @property
    def nbytes(self) -> int:
        """Bytes of the device that recording took for good."""
        ...

    def replay(self) -> StepTensors:
        """Launch it; the results are overwritten by the next launch, copy them on the same stream."""
        ...


class Recorder(Protocol):
    """Makes a step launchable as a whole."""

    def record(self, step: Step) -> Recorded:
        """Record a step; it may run meanwhile."""
        ...


class GraphCache:
    """Records steps, beforehand or on first use, and replays them afterwards.

    Args:
        rows: the row table.
        target: the target network.
        proposer: the drafter.
        ladder: what steps are padded to.
        kinds: where this engine's trees can come from.
        recorder: who records.
        walk: how far the target's tokens go along the trees.
        set_aside: bytes that the KV pool left for graphs; None: nobody measured.

    Attributes:
        num_eager: block steps that had no graph.
        seconds: what making the graphs took.
        nbytes: what they hold.
    """

    def __init__(
        self,
        rows: RowTable,
        target: ModelRunner,
        proposer: Proposer,
        *,
        ladder: Ladder,
        kinds: Sequence[Trees],
        recorder: Recorder,
        walk: Walk,
        set_aside: int | None,
    ) -> None:
        self.ladder = ladder
        self.kinds = kinds
        self.set_aside = set_aside
        self._rows = rows
        self._walk = walk
        self._target = target
        self._grower = proposer.grower
        self._observe = proposer.observe if proposer.observes else None
        self._spare = ladder.num_rows
        self._recorder = recorder
        self._given = TreePlaces(ladder.num_rows, ladder.max_nodes, rows.device)
        self._inputs: dict[int, _Inputs] = {}  # by padded rows
        self._allowed: dict[int, Tensor] = {}  # by padded tokens [T, W] int32, for grammars
        self._graphs: dict[GraphKey, Recorded] = {}
        self._too_large: set[GraphKey] = set()
        self._read: set[GraphKey] = set()  # what a graph of steps with trees read back would be
        self.num_eager = 0
        self.seconds = 0.0
        self.nbytes = 0

    @property
    def num_captured(self) -> int:
        """Graphs so far."""
        return len(self._graphs)

    @property
    def room(self) -> int | None:
        """Bytes of what was set aside that no graph has taken; None: nobody measured."""
        return None if self.set_aside is None else self.set_aside - self.nbytes

    def launch(
        self,
        trees: Trees,
        host_rows: list[int],
        num_pages: int,
        *,
        caps: Sequence[int] = (),
        roots: Sequence[int] = (),
        proposals: Sequence[Proposal] = (),
        allowed: Tensor | None = None,
    ) -> StepTensors | None:
        """Launch a step of these rows; None if no graph of it can be made, which is counted.

        Args:
            trees: where they come from; what `Grower.stage` brings has been staged.
            host_rows: the rows.
            num_pages: of a row that the step may look at.
            caps: GROWN: most draft nodes of each row.
            roots: GIVEN: the rows' next tokens.
            proposals: GIVEN: one for each row.
            allowed: [nodes, W] int32 grammar bits of the rows' nodes, on the device; not with GROWN.
        """
        key = self._key(
            trees, host_rows, num_pages, proposals=proposals, masked=allowed is not None
        )
        recorded = self._graphs.get(key) or self._on_demand(key)
        if recorded is None:
            self.num_eager += 1
            return None
        if trees is Trees.GIVEN:
            self._given.write(roots, proposals)
            caps = [len(p.tokens) for p in proposals]
        if allowed is not None:
            self._allowed[key.tokens][: len(allowed)].copy_(allowed, non_blocking=True)
        self._inputs[key.rows].write(host_rows, caps)
        return recorded.replay().first(len(host_rows))

    def pass_by(self, host_rows: list[int], num_pages: int) -> None:
        """Count a step without a graph: the host has read the network's trees. Said once a kind.

        A grammar has to see them, and what the network noted as it grew them lies at no place that a
        graph knows.

        Args:
            host_rows: the rows.
            num_pages: of a row that the step may look at.
        """
        self.num_eager += 1
        key = self._key(Trees.GROWN, host_rows, num_pages, masked=True)
        if key in self._read:
            return
        self._read.add(key)
        log.warning(
            "%s runs without a graph, slower, because the host reads a drafter network's trees where a row "
            "keeps a grammar; outputs are the same. Drafters without a network (suffix, ngram) have graphs "
            "of such steps",
            key,
        )

    def make(self, key: GraphKey) -> Recorded:
        """Record a step over spare rows, if that was not done: nothing of anybody's state changes.

        Raises:
            RuntimeError: what `lacks_memory` knows: the device has no memory for it.
        """
        if key in self._graphs:
            return self._graphs[key]
        started = time.perf_counter()
        if key.rows not in self._inputs:
            self._inputs[key.rows] = _Inputs(key.rows, self._spare, self._rows.device)
        inputs = self._inputs[key.rows]
        inputs.write([], [])
        allowed = self._place_of_masks(key.tokens) if key.masked else None

        def step() -> StepTensors:
            self._rows.num_pages = key.pages
            with self._rows.options.in_play_as(key.options, key.num_logprobs) as host_rows:
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
                    allowed,
                ).joined()

        recorded = self._recorder.record(step)
        self._graphs[key] = recorded
        self.nbytes += recorded.nbytes
        self.seconds += time.perf_counter() - started
        return recorded

    def _key(
        self,
        trees: Trees,
        host_rows: list[int],
        num_pages: int,
        *,
        proposals: Sequence[Proposal] = (),
        masked: bool,
    ) -> GraphKey:
        options = self._rows.options
        return self.ladder.key(
            trees,
            rows=len(host_rows),
            drafted=sum(len(p.tokens) for p in proposals),
            pages=num_pages,
            options=options.in_play(host_rows),
            num_logprobs=options.num_logprobs(host_rows),
            masked=masked,
        )

    def _on_demand(self, key: GraphKey) -> Recorded | None:
        """Record what the coming step asks for. None: there is no memory for it, which is said once."""
        if key in self._too_large:
            return None
        before, room = self.seconds, self.room
        try:
            recorded = self.make(key)
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            self._too_large.add(key)
            log.warning(
                "no memory is left to capture %s%s, so steps like it run without a graph, slower; outputs "
                "are the same. %s",
                key,
                f" ({len(self._graphs)} other graphs hold some)" if self._graphs else "",
                REMEDY,
            )
            return None
        log.info("captured %s on demand in %.1f s", key, self.seconds - before)
        if self.set_aside is not None and room is not None and 0 <= room < recorded.nbytes:
            log.warning(
                "%d graphs hold %.2f GB, more than the %.2f GB that were set aside for them when the KV "
                "pool was sized; they go on taking what is free. %s",
                len(self._graphs),
                self.nbytes / _GB,
                self.set_aside / _GB,
                REMEDY,
            )
        return recorded

    def _place_of_masks(self, num_tokens: int) -> Tensor:
        """Memory of grammars' bits for a step of so many tokens; only steps with a grammar take any."""
        if num_tokens not in self._allowed:
            words = -(-self._rows.options.vocab_size // 32)
            place = torch.full((num_tokens, words), -1, dtype=torch.int32, device=self._rows.device)
            self._allowed[num_tokens] = place
        return self._allowed[num_tokens]

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
    nbytes: int

    def replay(self) -> StepTensors:
        """See `Recorded`."""
        self.graph.replay()
        return self.tensors


class CudaRecorder:
    """Captures CUDA graphs, all in one pool of memory: no two of them ever run at the same time.

    All on one stream too: cuBLAS keeps work space for every stream that it has seen.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()
        self._num_made = 0

    def record(self, step: Step) -> Recorded:
        """See `Recorder`."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            for _ in range(_WARM_UPS):
                step()
        current.wait_stream(self._side)
        # A capture begins by giving back what PyTorch keeps; done before, it does not hide what is taken.
        current.synchronize()
        free_cached(self._device)
        before = free_memory(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer context restores the stream where the end of a capture fails.
            # Other threads may use the device meanwhile.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(
                    graph,
                    pool=self._memory,
                    stream=self._side,
                    capture_error_mode="thread_local",
                ),
            ):
                tensors = step()
        except BaseException:  # an interruption, too, ends a capture
            if not self._num_made:  # a pool that only failures had is gone with them
                self._memory = torch.cuda.graph_pool_handle()
            raise
        self._num_made += 1
        taken = max(0, before - free_memory(self._device))
        return _CudaGraph(graph=graph, tensors=tensors, nbytes=taken)
