"""GraphCache: captured CUDA graphs of plain block steps; the only place that captures.

A plain step (every row's root alone) has fixed shapes and reads nothing back, so on a GPU it is one
graph launch per (rows, pages, options). Rows are padded to a ladder with the spare row, which is never
live; pages are padded to a multiple of eight. Steps that verify drafts are not captured yet: they run
as they are, and are counted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.stages import silent
from paceline.core.tree import root
from paceline.engine.step import StepTensors, Walk, block_step
from paceline.sample.options import MIN_TOKENS

if TYPE_CHECKING:
    from paceline.engine.rows import RowTable
    from paceline.engine.runner import ModelRunner

log = logging.getLogger(__name__)

_PAGE_STEP = 8
_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a captured step was made for."""

    rows: int  # padded
    pages: int  # padded
    options: int  # word of the sampling options in play
    num_logprobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A graph, where its row ids go and where its results are."""

    graph: torch.cuda.CUDAGraph
    row_ids: Tensor  # [rows] int64, padded with the spare row
    caps: Tensor  # [rows] int64 zeros; the graph reads its memory, so it must live as long
    tensors: StepTensors


class GraphCache:
    """Captures on first use and replays afterwards. CUDA devices only.

    Attributes:
        num_eager: block steps that ran without a graph.
    """

    def __init__(self, rows: RowTable, target: ModelRunner, *, num_rows: int, walk: Walk) -> None:
        self._rows = rows
        self._target = target
        self._walk = walk
        self._ladder = _ladder(num_rows)
        self._spare = num_rows
        self._graphs: dict[GraphKey, Captured] = {}
        self._memory = torch.cuda.graph_pool_handle()  # shared by all graphs
        self.num_eager = 0

    def plain_step(self, host_rows: list[int], num_pages: int) -> StepTensors | None:
        """Launch a plain step of these rows; None if it cannot be captured (it is counted).

        The results are overwritten by the next launch: copy them on the same stream.
        """
        options = self._rows.options.in_play(host_rows)
        if options & MIN_TOKENS:  # its bans are made from host lists
            self.num_eager += 1
            return None
        widest = self._rows.pages.tensor.shape[1]
        key = GraphKey(
            rows=next(n for n in self._ladder if n >= len(host_rows)),
            pages=min(-(-num_pages // _PAGE_STEP) * _PAGE_STEP, widest),
            options=options,
            num_logprobs=self._rows.options.num_logprobs(host_rows),
        )
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._graphs[key] = self._capture(key, host_rows)
        padded = host_rows + [self._spare] * (key.rows - len(host_rows))
        captured.row_ids.copy_(torch.tensor(padded, pin_memory=True), non_blocking=True)
        captured.graph.replay()
        return _first_rows(captured.tensors, len(host_rows))

    def _capture(self, key: GraphKey, host_rows: list[int]) -> Captured:
        """Record a step over spare rows: nothing of anybody's state changes."""
        device = self._rows.device
        row_ids = torch.full((key.rows,), self._spare, dtype=torch.int64, device=device)
        caps = torch.zeros_like(row_ids)

        def step() -> StepTensors:
            return block_step(
                root(self._rows.next_token[row_ids]),
                row_ids,
                caps,
                key.rows,
                key.pages,
                host_rows,
                self._rows,
                self._target,
                silent,
                walk=self._walk,
            )

        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            tensors = step()
        log.info("captured a step of %d rows and %d pages a row", key.rows, key.pages)
        return Captured(graph=graph, row_ids=row_ids, caps=caps, tensors=tensors)


def _ladder(num_rows: int) -> list[int]:
    """Padded row counts: powers of two, and the capacity itself."""
    sizes = [1]
    while sizes[-1] < num_rows:
        sizes.append(min(2 * sizes[-1], num_rows))
    return sizes


def _first_rows(tensors: StepTensors, count: int) -> StepTensors:
    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:count]

    return StepTensors(
        emitted=tensors.emitted[:count],
        path=cut(tensors.path),
        sources=cut(tensors.sources),
        drafted=cut(tensors.drafted),
        logprobs=cut(tensors.logprobs),
        top_ids=cut(tensors.top_ids),
        top_logprobs=cut(tensors.top_logprobs),
    )
