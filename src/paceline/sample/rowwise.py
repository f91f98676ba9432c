"""One position at a time on a CPU: what `sampler.choose` defines, for a fraction of the work.

A CPU has no launches to save and no read to fear. So a position is processed with the options of its
own row only; penalties, bans and biases touch the tokens concerned, filters work on what they leave,
and noise is made for the survivors alone. Working by the row is also what makes a row's bits
independent of its company: every operation sees the same shape whatever the batch is.

Letters: V vocabulary, n survivors, K top log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paceline.core.tree import NOT_FINITE
from paceline.ops.reference import sampling as ops
from paceline.sample import options as opt
from paceline.sample.noise import gumbel, hash_row, noise_words

if TYPE_CHECKING:
    from paceline.sample.options import SamplingTable

_NUCLEUS_DEPTHS = (4.0, 10.0, math.inf)  # logits below the best within which a nucleus is sought


def argmax_rows(logits: Tensor) -> Tensor:
    """`argmax` of each row: [m, V] -> [m] int64.

    NumPy's argmax reads memory at full speed; torch's takes eight times as long.
    """
    values = logits.detach().numpy()
    tokens = np.argmax(values, axis=1)
    best = np.take_along_axis(values, tokens[:, None], axis=1)[:, 0]
    return torch.from_numpy(np.where(np.isfinite(best), tokens, NOT_FINITE))


def argmax(x: Tensor) -> int:
    """Lowest index of the largest value of x [n]; NOT_FINITE if there is no finite one.

    NaN counts as largest, so one look at the best value sees them all.
    """
    values = x.detach().numpy()
    if not values.shape[0]:
        return NOT_FINITE
    best = int(np.argmax(values))
    return best if math.isfinite(values[best]) else NOT_FINITE


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

    Returns:
        The token, or NOT_FINITE where there is none to choose.
    """
    options = table.host(row)
    # A mask or filter could hide that the target has failed; options must not decide that.
    if not math.isfinite(np.max(logits.detach().numpy())):
        return NOT_FINITE
    if options.flags & opt.EDITS or allowed is not None:
        logits = _edit(logits, row, num_output, path_tokens, allowed, table)
    if not options.flags & opt.NOISE:
        return argmax(logits)
    logits = logits / options.temperature
    ids = survivors(logits, options) if options.flags & opt.FILTERS else None
    words = noise_words(options.key, position)
    if ids is None:
        return argmax(gumbel(hash_row(table.token_ids, words), logits.dtype).add_(logits))
    noise = gumbel(hash_row(ids.to(torch.int32), words), logits.dtype)
    best = argmax(noise.add_(logits[ids]))
    return best if best < 0 else int(ids[best])


def score(logits: Tensor, token: int, num_top: int) -> tuple[float, Tensor, Tensor]:
    """`sampler.scored` for one position.

    Args:
        logits: [V], unprocessed.
        token: the emitted token.
        num_top: K.

    Returns:
        The token's log-probability, top_ids [K] int64 best first, top_logprobs [K].
    """
    normaliser = (
        logits.max() + ops.sum_in_order((logits - logits.max()).exp().unsqueeze(0))[0].log()
    )
    top = torch.empty(0, dtype=torch.int64)
    if num_top > 0:
        top = _best(logits, num_top)
        if top.shape[0] < num_top:  # NaN compares with nothing
            top = torch.topk(logits, num_top).indices
        top = top[torch.sort(logits[top], descending=True, stable=True).indices]
    return float(logits[token] - normaliser), top, logits[top] - normaliser


def survivors(logits: Tensor, options: opt.RowOptions) -> Tensor | None:
    """Ids that min_p, top_k and top_p leave, ascending [n] int64; None: all. Logits are [V]."""
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
        best = _nucleus(logits, options.top_p)
        ids = best if ids is None else ids[best]
    return ids


def _edit(
    logits: Tensor,
    row: int,
    num_output: int,
    path_tokens: Sequence[int],
    allowed: Tensor | None,
    table: SamplingTable,
) -> Tensor:
    """`process.edit` for one position, [V] -> [V]."""
    options, slots = table.host(row), table.slots
    logits = logits.clone()
    if options.flags & opt.MASK:
        logits.masked_fill_(slots.banned[options.slot], ops.NEG_INF)
    if allowed is not None:
        logits.masked_fill_(_forbidden(allowed, logits.shape[0]), ops.NEG_INF)
    if options.flags & opt.MIN_TOKENS and num_output < options.min_tokens:
        for ids in table.bans(row):
            kept = logits[ids]
            logits[ids] = ops.NEG_INF
            if not float(logits.max()) > ops.NEG_INF:
                logits[ids] = kept  # a ban may not leave nothing
    if options.flags & opt.BIAS:
        num = slots.num_bias[options.slot]
        values = slots.bias_values[options.slot, :num].to(logits.dtype)
        logits[slots.bias_ids[options.slot, :num]] += values
    if options.flags & opt.PENALTY:
        counts = slots.counts[options.slot].clone()
        for token in path_tokens:
            if token >= 0:
                counts[token] += 1
        in_prompt = slots.in_prompt[options.slot]
        seen = _where((counts > 0) | in_prompt)
        at = torch.tensor([row])
        logits[seen] = ops.penalize(
            logits[seen].unsqueeze(0),
            counts[seen].unsqueeze(0),
            in_prompt[seen].unsqueeze(0),
            torch.empty(1, 0, dtype=torch.int64),
            table.repetition[at],
            table.presence[at],
            table.frequency[at],
        )[0]
    return logits


def _forbidden(words: Tensor, size: int) -> Tensor:
    """Which tokens `ops.unpack_bits` leaves out: words [ceil(size / 32)] int32 -> [size] bool.

    NumPy spreads bits of whole bytes; torch would shift every word 32 times.
    """
    octets = words.numpy().astype("<i4", copy=False).view(np.uint8)
    return torch.from_numpy(np.unpackbits(~octets, count=size, bitorder="little").view(np.bool_))


def _best(logits: Tensor, count: int) -> Tensor:
    """Indices of the `count` best of logits [n], value descending then index; ascending [count]."""
    border = torch.topk(logits, count).values[-1]
    return _cut(logits, _where(logits >= border), border, count)


def _cut(logits: Tensor, keep: Tensor, border: Tensor, count: int) -> Tensor:
    """Drop the last ties at the border where more than `count` indices are kept."""
    extra = keep.shape[0] - count
    if extra <= 0:
        return keep
    ties = _where(logits[keep] == border)
    stays = torch.ones(keep.shape[0], dtype=torch.bool)
    stays[ties[ties.shape[0] - extra :]] = False
    return keep[stays]


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Indices of the nucleus of logits [n], ascending.

    What lies within some depth of the best usually carries the mass, so only that is sorted.
    """
    best = logits.max()
    weights = ops.mass(logits, best)
    enough = top_p * float(int(weights.sum()))
    for depth in _NUCLEUS_DEPTHS:
        near = _where(logits >= best - depth)
        inside = logits[near]
        if depth < math.inf and not float(int(weights[near].sum())) >= enough:
            continue
        # NumPy's sort is vectorised; torch's carries indices along.
        ranked = torch.from_numpy(np.sort(inside.numpy())[::-1].copy())
        if not ranked.shape[0]:
            break
        part = ops.mass(ranked, best)
        before = part.cumsum(0) - part
        size = max(int((before.to(torch.float64) < enough).sum()), 1)
        border = ranked[size - 1]
        return near[_cut(inside, _where(inside >= border), border, size)]
    return torch.empty(0, dtype=torch.int64)  # NaN


def _where(keep: Tensor) -> Tensor:
    return torch.from_numpy(np.flatnonzero(keep.numpy()))
