"""Candidates and what their scores mean: the definitions of `draft/candidates.py`'s operators.

`largest` finds the likeliest tokens of each position. `rank_candidates` orders them by their perturbed scores
and says how likely each survives; `learn` learns from what the target then emitted. Plain torch, any device, no
read of a device value.

Letters: B rows, P positions, C candidates. Tables [4, P] are by kind (greedy, sampled) and, within a kind,
by what stands before (the spine, another path).
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Five: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def by_row(table: Tensor, temperature: Tensor) -> Tensor:
    """The numbers [B, 2, P] of a table [4, P] for rows of these temperatures [B]."""
    return table.view(2, 2, -1)[(temperature > 0).long()]


def sharpness(log: Tensor, temperature: Tensor) -> Tensor:
    """Sharpness [B, 2, P] for rows of these temperatures [B], of its logarithms [4, P].

    Errors of the drafter's logits grow as they are divided by the temperature; the noise does not.
    """
    scale = torch.where(temperature > 0, temperature, 1.0).to(log.dtype)
    return by_row(log, temperature).exp() * scale.view(-1, 1, 1)


def heat(temperature: Tensor, dtype: torch.dtype) -> Tensor:
    """What logits of rows [B] are divided by: 1 for greedy rows."""
    return torch.where(temperature > 0, temperature, 1.0).to(dtype)


def largest(
    logits: Tensor, temperature: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Each position's largest logits, tempered, and the mass of all. NaN counts as larger than all.

    Args:
        logits: [B, P, V].
        temperature: [B]; 0 for greedy rows, whose logits are not divided. None: all are.
        count: C, at most V.

    Returns:
        [B, P, C] the `count` largest, divided by the temperature; their ids [B, P, C] int64; [B, P]
        `logsumexp` over the vocabulary. Their order is left open (`rank_candidates` makes one), and which
        is taken of several that are equal to the least.
    """
    y = logits
    if temperature is not None:
        y = logits / heat(temperature, logits.dtype).view(-1, 1, 1)
    return *y.topk(count, dim=-1), y.logsumexp(-1)


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
    """Order candidates by perturbed score, among equals by id; weigh them.

    Args:
        top: [B, P, C] log-probabilities up to a constant, tempered.
        ids: [B, P, C] int64 tokens.
        mass: [B, P] `logsumexp` over the whole vocabulary, of which `top` are the largest.
        noise: [B, P, C] what is added to `top`; None: nothing.
        temperature: [B]; 0 for greedy rows.
        log: [4, P] logarithms of sharpness.
        held: [4, P] emitted tokens that were candidates.
        claimed: [4, P] how many should have been.

    Returns:
        ids [B, P, C] best first; their scores; share [B, P]; weights [B, P, C] float32 after the spine, and
        after any other path. See `Candidates`.
    """
    share = (top - mass.unsqueeze(-1)).exp().sum(-1).log().clamp(max=0.0)  # none is above its mass
    if noise is not None or not _falls(top):
        ids, order = ids.sort(dim=-1)  # so that equal scores stand in the order of their ids
        top = top if noise is None else top + noise.to(top.dtype)
        top, second = top.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(-1, second)
    reach = (held / claimed).log()
    if temperature.is_cpu and not bool((temperature > 0).any()):  # reading is free here
        sharp, reach = log[:2].exp().unsqueeze(0), reach[:2].unsqueeze(0)
    else:
        sharp, reach = sharpness(log, temperature), by_row(reach, temperature)
    held = (share.unsqueeze(1) + reach).clamp(max=0.0)
    scaled = top.unsqueeze(1) * sharp.to(top.dtype).unsqueeze(3)
    weights = (scaled.log_softmax(-1) + held.unsqueeze(3)).to(torch.float32)
    return ids, top, share, weights[:, 0], weights[:, 1]


def _falls(top: Tensor) -> bool:
    """Whether numbers are known to stand in falling order, no two of them equal."""
    return top.is_cpu and bool((top[..., 1:] < top[..., :-1]).all())  # reading is free here


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
    """One step of stochastic Newton on the likelihood of the emitted tokens, in log sharpness; in place.

    Args:
        ids: [B, P, C] int64 candidates, best first.
        scores: [B, P, C] of them.
        share: [B, P] log of their part of the drafter's distribution.
        temperature: [B], as it was when they were ranked.
        emitted: [B, P] int64 tokens that the target emitted at these positions; -1: none, which teaches
            nothing. A token that was no candidate teaches about `held` and `claimed` alone.
        tables: log sharpness, information, held and claimed, [4, P] float32 each: `Calibration`.
        kept: of what was learned, per judged token.
        bounds: of log sharpness.
    """
    log, information, held, claimed = tables
    off = (emitted != ids[:, :, 0]).cumsum(1).roll(1, 1) > 0  # [B, P]
    off[:, :1] = False
    sharp = sharpness(log, temperature)
    sharp = torch.where(off, sharp[:, 1], sharp[:, 0]).unsqueeze(2)
    x = scores.to(sharp.dtype) * sharp
    part = x.softmax(-1)
    mean = (part * x).sum(-1)
    hit = ids == emitted.unsqueeze(2)
    judged, found = emitted >= 0, hit.any(-1)
    gradient = (x * hit).sum(-1) - mean  # d log-likelihood / d log sharpness
    variance = (part * x.square()).sum(-1) - mean.square()
    one = torch.ones_like(mean)
    claims = share.to(mean.dtype).exp().nan_to_num(0.0)
    values = torch.stack((gradient.nan_to_num(0.0), variance.nan_to_num(0.0), one, one, claims))
    masks = torch.stack((found, found, found, judged, judged))
    at = (2 * (temperature > 0).long().unsqueeze(1) + off).expand_as(values)
    sums = values.new_zeros(5, *log.shape).scatter_add_(1, at, torch.where(masks, values, 0.0))
    gradient, gained, seen, count, claims = sums
    keep = kept**count
    information.mul_(keep).add_(gained)
    log.add_(gradient / information).clamp_(*bounds)
    held.mul_(keep).add_(seen)
    claimed.mul_(keep).add_(claims)
