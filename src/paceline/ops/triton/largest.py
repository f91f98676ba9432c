"""The largest of a vocabulary's numbers on a GPU, and the mass of all, in one read and three kernels.

    kernel   programs        does
    parts    rows, parts     reads everything: maxima of blocks of 64, sums of exponentials
    choose   rows            joins the sums; which blocks have the largest maxima
    take     rows            reads those blocks: the largest numbers and their ids

The `count` largest numbers lie in the `count` blocks with the largest maxima. Who is among the first so many
is found by bisection over keys held in registers, which ends as soon as a key has that many above it: some
ten counts, where a sort of as many numbers takes dozens of steps. Nothing is sorted: candidates are ordered
once noise was added.

Logits are compared as they are and divided by the temperature at the end, which changes no order; so no
tempered copy of the vocabulary is made.

Letters: B rows, P positions, V vocabulary, C count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.ops import largest as composed
from paceline.ops.reference.peaks import BLOCK
from paceline.ops.triton.largest_kernels import choose_kernel, take_kernel
from paceline.ops.triton.peaks import read_parts
from paceline.ops.triton.sizes import power_of_two

if TYPE_CHECKING:
    from torch import Tensor

_MOST = 512  # numbers sought by one program: 32,768 are held in registers
_WIDEST = 1 << 20  # numbers of a row, whose blocks' maxima are held likewise
_PER_WARP = 512  # numbers


def largest(
    logits: Tensor, temperature: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.reference.candidates.largest`; of equals the lowest ids, in the order of ids."""
    rows, positions, width = logits.shape
    if count > _MOST or width > _WIDEST:
        return composed.largest(logits, temperature, count)
    spots, dev = rows * positions, logits.device
    x = logits.reshape(spots, width)
    x = x if x.stride(1) == 1 else x.contiguous()
    cells = -(-width // BLOCK)
    chosen_cells = min(count, cells)
    top = torch.empty(rows, positions, count, dtype=x.dtype, device=dev)
    ids = torch.empty(rows, positions, count, dtype=torch.int64, device=dev)
    mass = torch.empty(rows, positions, dtype=x.dtype, device=dev)
    if not spots:
        return top, ids, mass
    maxima = torch.empty(spots, cells, dtype=x.dtype, device=dev)
    # Of a cut of a row: [spots, parts] float32 each. Of a row: its blocks, and who reaches the last of them.
    bases, sums = read_parts(x, maxima, temperature, positions)
    chosen = torch.empty(spots, chosen_cells, dtype=torch.int32, device=dev)
    borders = torch.empty(spots, dtype=torch.int32, device=dev)
    # Kernels take pointers: one that is not used may be anything.
    heat, step = (x, 0) if temperature is None else (temperature, temperature.stride(0))
    parts, block = bases.shape[1], power_of_two(chosen_cells * BLOCK)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        choose_kernel[(spots,)](
            maxima,
            bases,
            sums,
            heat,
            mass,
            chosen,
            borders,
            cells,
            parts,
            positions,
            step,
            COUNT=chosen_cells,
            CELLS=power_of_two(cells),
            PARTS=power_of_two(parts),
            TEMPERED=temperature is not None,
            BOUNDS=chosen_cells == count,
            num_warps=_warps(power_of_two(cells)),
            num_stages=1,
        )
        take_kernel[(spots,)](
            x,
            heat,
            chosen,
            borders,
            top,
            ids,
            x.stride(0),
            width,
            positions,
            step,
            COUNT=count,
            CELLS=chosen_cells,
            CELL=BLOCK,
            BLOCK=block,
            TEMPERED=temperature is not None,
            num_warps=_warps(block),
            num_stages=1,
        )
    return top, ids, mass


def _warps(count: int) -> int:
    return min(max(count // _PER_WARP, 4), 16)
