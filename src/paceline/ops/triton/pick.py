"""The target's token out of logits on a GPU: no softmax, no noise, no sorted copy of [m, V] in memory.

What is computed is `sample.sampler.choose`'s: the argmax of tempered logits plus keyed noise among the
tokens that min_p, top_k and top_p leave; ties go to the lowest id. Every decision is a maximum, a count
or a sum of whole numbers, so it does not depend on how a row is cut into parts, nor on its company.

    kernel   programs     does
    scan     rows, parts  best score and largest number of a part; with top_k: of cells of 64 tokens
    decide   rows         joins parts: done, unless the row has filters
    bound    rows         top_k: the k-th largest of all cells' largest numbers; the best k are above
    gather   rows, parts  top_k: reads the cells that reach the bound, lists what does
    solve    rows         top_k: ranks and weighs the list, applies min_p and top_p, picks; done
    judge    rows, parts  else: mass in all, mass before the candidate, the best score before it
    settle   rows         the candidate passes, or that best score is the next candidate
    walk     rows         who is still not done, alone, by the same rules

Why a candidate. What filters leave is a row's first n tokens by value. So the best score of all tokens
is the answer if it is among them; and it is if little enough mass stands before it, for which one read
without any threshold or order will do. If not, the answer stands before it: the best score among those is
the next candidate. The first passes with the nucleus' probability: two rounds of parts settle nearly
every row. A list that overflows (top_k above a few hundred, thousands of equal logits) goes to `walk`,
which finds the cut bit by bit.

Noise is made where it may matter: a cheap bound tells which blocks hold a token that could still win.

All options are read on the device, so rows of all kinds share a launch, and the kernels launched follow
from host values alone: a captured graph serves whatever stands in the table later, as long as it asks
for no filter that it was captured without.

Letters: m rows, V vocabulary, R rows of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from paceline.ops.triton import pick_filter_kernels as filters
from paceline.ops.triton.pick_kernels import decide_kernel, scan_kernel
from paceline.ops.triton.sizes import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

_CELL: Final = 64  # tokens of one largest number
_GROUP: Final = 256  # tokens that gather looks at together
_JUDGE_BLOCK: Final = 1024
_ITEMS: Final = 32  # tokens that solve compares with as many


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Columns of the rows' options, on the device, and which of them are in play."""

    temperature: Tensor  # [R] float64; 0: greedy
    top_p: Tensor  # [R] float64
    log_min_p: Tensor  # [R] float64
    top_k: Tensor  # [R] int64, V or more where it is off
    keys: Tensor  # [R] int64 noise keys
    noise: bool  # whether any row samples; the rest counts only if so
    uses_min_p: bool
    uses_top_k: bool
    uses_top_p: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a pick is spread over the device; a choice of speed, which changes no token."""

    block: int  # tokens at once, a power of two >= 64
    part: int  # tokens of a program, a multiple of block
    room: int = 1024  # listed tokens of a row
    most_k: int = 512  # largest top_k that is tried with a list
    rounds: int = 2  # candidates judged by parts before a row walks alone
    walk_block: int = 4096


def tiling_for(rows: int, vocab_size: int, processors: int) -> Tiling:
    """Parts that give every multiprocessor eight programs, and no more than there is work for."""
    block = 1024 if rows * vocab_size < 1 << 24 else 2048
    parts = min(max(8 * processors // max(rows, 1), 1), -(-vocab_size // block))
    part = -(-vocab_size // parts)
    return Tiling(block=block, part=-(-part // block) * block)


def pick(
    raw: Tensor,
    work: Tensor,
    rows: Tensor,
    positions: Tensor,
    options: Options,
    tiling: Tiling | None = None,
) -> Tensor:
    """Pick a token in every row; NOT_FINITE where there is none to choose.

    Args:
        raw: [m, V] logits as the head gave them: a NaN or +inf among them means that it failed.
        work: [m, V] logits after masks, bias and penalties; `raw` itself where there were none.
        rows: [m] int64 rows of the table.
        positions: [m] int64 positions of the tokens to be emitted.
        options: the table's columns.
        tiling: instead of `tiling_for`'s.

    Returns:
        [m] int64.
    """
    count, size = work.shape
    tokens = torch.empty(count, dtype=torch.int64, device=work.device)
    if count == 0:
        return tokens
    edited = raw is not work
    raw, work = (x if x.stride(1) == 1 else x.contiguous() for x in (raw, work))
    rows, positions = rows.contiguous(), positions.contiguous()
    tiling = tiling or tiling_for(count, size, _processors(work.device))
    with torch.cuda.device_of(work):  # type: ignore[no-untyped-call]
        _Pick(raw, work, rows, positions, options, tiling, tokens).run(edited=edited)
    return tokens


class _Pick:
    """One pick's memory and launches."""

    def __init__(
        self,
        raw: Tensor,
        work: Tensor,
        rows: Tensor,
        positions: Tensor,
        options: Options,
        tiling: Tiling,
        tokens: Tensor,
    ) -> None:
        count, size = work.shape
        device = work.device
        self._raw, self._work, self._rows, self._positions = raw, work, rows, positions
        self._options, self._tiling, self._tokens = options, tiling, tokens
        self._num_parts = -(-size // tiling.part)
        self._num_cells = -(-size // _CELL)
        self._parts = (count, self._num_parts)
        self._floats, self._ints = options.temperature.stride(0), options.top_k.stride(0)
        assert options.top_p.stride(0) == options.log_min_p.stride(0) == self._floats, "one table"
        assert options.keys.stride(0) == self._ints, "one table"
        self._best, self._totals, self._befores = torch.empty(
            3, *self._parts, dtype=torch.int64, device=device
        )
        self._peaks = torch.empty(self._parts, dtype=torch.float32, device=device)
        self._faults = torch.empty(self._parts, dtype=torch.int32, device=device)
        self._lead = torch.empty(count, dtype=torch.int64, device=device)
        self._peak_of = torch.empty(count, dtype=torch.float32, device=device)
        self._state, self._found, self._bounds = torch.empty(
            3, count, dtype=torch.int32, device=device
        )
        lists = options.noise and options.uses_top_k
        self._cells = torch.empty(
            (count, self._num_cells) if lists else (1,), dtype=torch.int32, device=device
        )
        self._items = torch.empty(
            (count, tiling.room) if lists else (1,), dtype=torch.int64, device=device
        )

    def run(self, *, edited: bool) -> None:
        """Launch what the options in play may need."""
        options = self._options
        self._scan(edited=edited)
        if not options.noise:
            return
        if options.uses_top_k:
            self._solve()
        if options.uses_top_p or options.uses_min_p:
            for _ in range(self._tiling.rounds):
                self._judge()
        if options.uses_top_k or options.uses_top_p or options.uses_min_p:
            self._walk()

    def _scan(self, *, edited: bool) -> None:
        options, work = self._options, self._work
        scan_kernel[self._parts](
            self._raw,
            work,
            self._rows,
            self._positions,
            options.temperature,
            options.keys,
            options.top_k,
            self._best,
            self._peaks,
            self._faults,
            self._cells,
            self._raw.stride(0),
            work.stride(0),
            self._floats,
            self._ints,
            work.shape[1],
            self._tiling.part,
            self._num_parts,
            self._num_cells,
            EDITED=edited,
            NOISE=options.noise,
            TOP_K=options.uses_top_k,
            BLOCK=self._tiling.block,
            CELL=_CELL,
            num_warps=_warps(self._tiling.block),
            num_stages=1,
        )
        decide_kernel[(work.shape[0],)](
            work,
            self._rows,
            options.temperature,
            options.top_k,
            options.top_p,
            options.log_min_p,
            self._best,
            self._peaks,
            self._faults,
            self._tokens,
            self._state,
            self._lead,
            self._peak_of,
            self._found,
            work.stride(0),
            self._floats,
            self._ints,
            work.shape[1],
            self._num_parts,
            min(self._tiling.most_k, self._num_cells // 2),
            NOISE=options.noise,
            TOP_K=options.uses_top_k,
            TOP_P=options.uses_top_p,
            MIN_P=options.uses_min_p,
            PARTS=power_of_two(self._num_parts),
            num_warps=1,
            num_stages=1,
        )

    def _solve(self) -> None:
        options, work = self._options, self._work
        filters.bound_kernel[(work.shape[0],)](
            self._cells,
            self._rows,
            options.top_k,
            self._state,
            self._bounds,
            self._ints,
            self._num_cells,
            CELLS=power_of_two(self._num_cells),
            num_warps=4,
            num_stages=1,
        )
        filters.gather_kernel[self._parts](
            work,
            self._rows,
            options.temperature,
            self._state,
            self._cells,
            self._bounds,
            self._found,
            self._items,
            work.stride(0),
            self._floats,
            work.shape[1],
            self._tiling.part,
            self._num_cells,
            self._tiling.room,
            GROUP=min(_GROUP, self._tiling.block),
            CELL=_CELL,
            num_warps=4,
            num_stages=1,
        )
        filters.solve_kernel[(work.shape[0],)](
            self._rows,
            self._positions,
            options.keys,
            options.top_k,
            options.top_p,
            options.log_min_p,
            self._state,
            self._peak_of,
            self._found,
            self._items,
            self._tokens,
            self._floats,
            self._ints,
            self._tiling.room,
            TOP_P=options.uses_top_p,
            ITEMS=_ITEMS,
            num_warps=4,
            num_stages=1,
        )

    def _judge(self) -> None:
        options, work = self._options, self._work
        judge_block = min(self._tiling.block, _JUDGE_BLOCK)  # both are powers of two
        filters.judge_kernel[self._parts](
            work,
            self._rows,
            self._positions,
            options.temperature,
            options.keys,
            options.log_min_p,
            self._state,
            self._lead,
            self._peak_of,
            self._totals,
            self._befores,
            self._best,
            work.stride(0),
            self._floats,
            self._ints,
            work.shape[1],
            self._tiling.part,
            self._num_parts,
            BLOCK=judge_block,
            num_warps=2 * _warps(judge_block),  # of the registers that a token takes
            num_stages=1,
        )
        filters.settle_kernel[(work.shape[0],)](
            work,
            self._rows,
            options.temperature,
            options.top_p,
            options.log_min_p,
            self._state,
            self._lead,
            self._peak_of,
            self._totals,
            self._befores,
            self._best,
            self._tokens,
            work.stride(0),
            self._floats,
            self._num_parts,
            PARTS=power_of_two(self._num_parts),
            num_warps=1,
            num_stages=1,
        )

    def _walk(self) -> None:
        options, work = self._options, self._work
        walk_block = min(self._tiling.walk_block, power_of_two(work.shape[1]))
        filters.walk_kernel[(work.shape[0],)](
            work,
            self._rows,
            self._positions,
            options.temperature,
            options.keys,
            options.top_k,
            options.top_p,
            options.log_min_p,
            self._state,
            self._lead,
            self._peak_of,
            self._tokens,
            work.stride(0),
            self._floats,
            self._ints,
            work.shape[1],
            TOP_K=options.uses_top_k,
            BLOCK=walk_block,
            num_warps=_warps(walk_block),
            num_stages=1,
        )


def _processors(device: torch.device) -> int:
    """How many multiprocessors a CUDA device has."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _warps(block: int) -> int:
    """Eight tokens a thread: two loads of 16 bytes."""
    return min(max(block // 256, 1), 16)
