"""Candidates' noise, their order, and what is learned from them, a kernel each.

The definitions are `ops/reference/candidates.py` and, of `keyed_noise`, `sample/noise.py`.

Letters: B rows, P positions, C candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.ops.triton.candidates_kernels import learn_kernel, noise_kernel, rank_kernel
from paceline.ops.triton.tree import block, warps

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.ops.reference.candidates import Five

_NOISE = 128  # tokens that a program hashes at once
_ROWS = 4  # rows of a position that a program judges at once


def rank_candidates(
    top: Tensor,
    ids: Tensor,
    mass: Tensor,
    noise: Tensor | None,
    temperature: Tensor,
    log: Tensor,
    held: Tensor,
    claimed: Tensor,
) -> Five:
    """See `ops.reference.candidates.rank_candidates`."""
    rows, positions, count = top.shape
    out_ids = torch.empty(top.shape, dtype=torch.int64, device=top.device)
    out = torch.empty(3, *top.shape, dtype=torch.float32, device=top.device)
    share = torch.empty(rows, positions, dtype=torch.float32, device=top.device)
    with torch.cuda.device_of(top):  # type: ignore[no-untyped-call]
        rank_kernel[rows * positions,](
            top.contiguous(),
            ids.contiguous(),
            mass.contiguous(),
            top if noise is None else noise.contiguous(),  # a pointer that is not used
            temperature,
            log,
            held,
            claimed,
            out_ids,
            out[0],
            share,
            out[1],
            out[2],
            positions,
            temperature.stride(0),
            log.stride(0),
            log.stride(1),
            COUNT=count,
            BLOCK=block(count),
            HAS_NOISE=noise is not None,
            num_warps=max(4, warps(block(count))),
        )
    return out_ids, out[0], share, out[1], out[2]


def learn(
    ids: Tensor,
    scores: Tensor,
    share: Tensor,
    temperature: Tensor,
    emitted: Tensor,
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    kept: float,
    bounds: tuple[float, float],
) -> None:
    """See `ops.reference.candidates.learn`."""
    rows, positions, count = scores.shape
    emitted = emitted.contiguous()
    log = tables[0]
    with torch.cuda.device_of(log):  # type: ignore[no-untyped-call]
        learn_kernel[positions,](
            ids.contiguous(),
            scores.contiguous(),
            share.contiguous(),
            temperature,
            emitted,
            *tables,
            kept,
            *bounds,
            rows,
            positions,
            temperature.stride(0),
            emitted.stride(0),
            log.stride(0),
            log.stride(1),
            COUNT=count,
            BLOCK=block(count),
            BLOCK_P=block(positions),
            ROWS=_ROWS,
            num_warps=4,
        )


def keyed_noise(
    rows: Tensor, positions: Tensor, token_ids: Tensor, keys: Tensor, temperature: Tensor
) -> Tensor:
    """See `sample.noise.keyed_noise`."""
    return _noise(rows, positions.contiguous(), token_ids, keys, temperature, 0)


def noise_ahead(
    rows: Tensor, lens: Tensor, token_ids: Tensor, keys: Tensor, temperature: Tensor
) -> Tensor:
    """See `sample.noise.noise_ahead`."""
    return _noise(rows, lens, token_ids, keys, temperature, token_ids.shape[1])


def _noise(
    rows: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    keys: Tensor,
    temperature: Tensor,
    ahead: int,
) -> Tensor:
    """Of tokens [..., n]; with `ahead` positions a row, `positions` are those of rows' newest tokens."""
    out = torch.empty(token_ids.shape, dtype=torch.float32, device=token_ids.device)
    count = token_ids.shape[-1]
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        noise_kernel[out.numel() // count,](
            rows.contiguous(),
            positions,
            token_ids.contiguous(),
            keys,
            temperature,
            out,
            ahead,
            keys.shape[0] - 1,
            count,
            keys.stride(0),
            temperature.stride(0),
            positions.stride(0),
            AHEAD=ahead > 0,
            BLOCK=_NOISE,
            num_warps=4,
        )
    return out
