"""One position at a time on a CPU: the same token as `sampler.choose`, for less work.

A CPU has no launches to save and no read to fear, so a position is processed with the options of its
own row only, filters work on the tokens they leave, and noise is made for those alone. Working by
the row is also what makes a row's bits independent of its company: every operation sees the same
shape whatever the batch is.

Letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paceline.ops.reference import sampling as ops
from paceline.sample import options as opt
from paceline.sample.noise import gumbel, hash_row, noise_words
from paceline.sample.process import edit

if TYPE_CHECKING:
    from paceline.sample.options import SamplingTable

_FIRST_GUESS = 64  # most nuclei are smaller; a partial sort of this many is cheap


def argmax_rows(logits: Tensor) -> Tensor:
    """Lowest id of the largest logit of each row [m, V] -> [m] int64, NaN counting as largest.

    NumPy's argmax reads memory at full speed; torch's takes eight times as long.
    """
    return torch.from_numpy(np.argmax(logits.detach().numpy(), axis=1))


def argmax(x: Tensor) -> int:
    """Lowest index of the largest value of x [n]; 0 if n is 0."""
    return int(np.argmax(x.detach().numpy())) if x.shape[0] else 0


def draw(
    logits: Tensor,
    *,
    row: int,
    position: int,
    num_output: int,
    path_tokens: Sequence[int],
    allowed: Tensor | None,
    table: SamplingTable,
) -> int:
    """The target's token at one position.

    Args:
        logits: [V] float32 or float64; not changed.
        row: row id.
        position: absolute position of the token to be emitted.
        num_output: tokens emitted before it.
        path_tokens: tokens below the root on the node's path; -1 is padding.
        allowed: [ceil(V / 32)] int32 grammar bits, or None.
        table: the rows' options.
    """
    options = table.host(row)
    if options.flags & opt.EDITS or allowed is not None:
        logits = edit(
            logits.unsqueeze(0),
            torch.tensor([row]),
            torch.tensor([num_output]),
            torch.tensor([path_tokens], dtype=torch.int64).view(1, -1),
            None if allowed is None else allowed.unsqueeze(0),
            table,
            options.flags,
            (row,),
        )[0]
    if not options.flags & opt.NOISE:
        return argmax(logits)
    logits = logits / options.temperature
    ids = survivors(logits, options) if options.flags & opt.FILTERS else None
    words = noise_words(options.key, position)
    if ids is None:
        return argmax(gumbel(hash_row(table.token_ids, words), logits.dtype).add_(logits))
    noise = gumbel(hash_row(ids.to(torch.int32), words), logits.dtype)
    best = argmax(noise.add_(logits[ids]))
    return int(ids[best]) if ids.shape[0] else 0


def survivors(logits: Tensor, options: opt.RowOptions) -> Tensor | None:
    """Ids that min_p, top_k and top_p leave, ascending [n] int64; None: all. logits is [V]."""
    ids: Tensor | None = None
    if options.flags & opt.MIN_P:
        gap = logits - logits.max()
        ids = _where(gap >= options.log_min_p)
        logits = logits[ids]
    if options.top_k < logits.shape[0]:
        best = _best(logits, options.top_k)
        ids = best if ids is None else ids[best]
        logits = logits[best]
    if options.top_p < 1 and logits.shape[0]:
        size = _nucleus(logits, options.top_p)
        if size < logits.shape[0]:
            best = _best(logits, size)
            ids = best if ids is None else ids[best]
    return ids


def _best(logits: Tensor, count: int) -> Tensor:
    """Indices of the `count` best of logits [n], value descending then index; ascending [count]."""
    border = torch.topk(logits, count).values[-1]
    keep = _where(logits >= border)
    extra = keep.shape[0] - count
    if extra <= 0:
        return keep
    # Too many tie at the border: the last of them go.
    ties = _where(logits[keep] == border)
    stays = torch.ones(keep.shape[0], dtype=torch.bool)
    stays[ties[ties.shape[0] - extra :]] = False
    return keep[stays]


def _nucleus(logits: Tensor, top_p: float) -> int:
    """`nucleus_size` of logits [n], from a partial sort where that suffices."""
    total = int(ops.mass(logits, logits.max()).sum())
    enough = top_p * float(total)
    num = logits.shape[0]
    guess = _FIRST_GUESS
    while True:
        guess = num if guess * 64 > num else guess
        ranked = torch.topk(logits, guess).values if guess < num else _descending(logits)
        weights = ops.mass(ranked, ranked[:1])
        upto = weights.cumsum(0)
        size = int(((upto - weights).to(torch.float64) < enough).sum())
        if size < guess or guess == num:
            return max(size, 1)
        guess *= 16


def _descending(logits: Tensor) -> Tensor:
    """Sorted values; NumPy's sort is vectorised, torch's carries indices along."""
    return torch.from_numpy(np.sort(logits.detach().numpy())[::-1].copy())


def _where(keep: Tensor) -> Tensor:
    return torch.from_numpy(np.flatnonzero(keep.numpy()))
