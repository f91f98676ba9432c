"""Candidates: the likely tokens of each position of a block, ranked as the target will rank them.

The target emits the argmax of its tempered log-probabilities plus noise keyed by position and token.
A drafter that adds the *same* noise to its own makes the same choice wherever the two distributions
agree well enough (shared-noise coupling, arXiv 2408.07978), and its second choice is then the likeliest
alternative: perturbed top-k. At temperature 0 there is no noise, and this is plain top-k.

Survival. Let x be a candidate's perturbed score. If the errors of x are Gumbel distributed with scale
1 / sharpness, the chance that a candidate is the target's choice is its share of softmax(sharpness * x)
(Luce's choice rule): a clear gap to the next candidate means near certainty, a small one means nearly
equal chances. At temperature 0 and sharpness 1 this is the drafter's own probability. How sharp the
scores really are differs by drafter, by position and between greedy and sampled rows, so it is learned
from every emitted token by maximum likelihood, on the device.

Not here: which candidates are proposed (`dflash.py`, `ddtree.py`).

Letters: B rows, P positions of a block that are proposed, V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

CHUNK = 128  # positions whose logits exist at the same time
SAMPLED = 128  # candidates of a sampled row: the noise may lift any of them to the top
_BLOCK = 64  # tokens, for finding the largest on a CPU
_GREEDY_SHARPNESS = 1.0  # a drafter trained with cross-entropy means what it says
# Simulated (V = 2,000, entropies 2.6 to 5.7 nats): the best value is 3.3 at KL(p||q) 0.1, 2 at 0.2 to
# 0.25, 1.7 at 0.4, 1.2 at 1.
_SAMPLED_SHARPNESS = 1.5
_LEAST, _MOST = math.log(0.1), math.log(10.0)  # log sharpness stays between these
_KEPT = 0.998  # of what was learned, per judged token
_PRIOR = 20.0  # judged tokens of information that the starting value is worth


Gains: TypeAlias = Callable[[int, "Tensor | None", Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Each position's likely tokens, best first; among equals the lowest id."""

    ids: Tensor  # [B, P, C] int64
    scores: Tensor  # [B, P, C] perturbed scores, not increasing
    weights: Tensor  # [B, P, C] float32 log survival, given that the path before is right

    @staticmethod
    def cat(parts: Sequence[Candidates]) -> Candidates:
        """The rows of one after those of the other."""
        if len(parts) == 1:
            return parts[0]
        return Candidates(
            ids=torch.cat([p.ids for p in parts]),
            scores=torch.cat([p.scores for p in parts]),
            weights=torch.cat([p.weights for p in parts]),
        )


class Sharpness:
    """How much the gaps between scores mean: by position, for greedy and for sampled rows.

    Args:
        num_positions: P.
        device: where the numbers live; nothing here is read by the host.
    """

    def __init__(self, num_positions: int, device: torch.device) -> None:
        start = torch.tensor([[_GREEDY_SHARPNESS], [_SAMPLED_SHARPNESS]], device=device)
        self._log = start.log().expand(2, num_positions).clone()  # [2, P]: greedy, sampled
        self._information = torch.full_like(self._log, _PRIOR)

    def of(self, temperature: Tensor) -> Tensor:
        """Sharpness [B, P] for rows of these temperatures [B].

        Errors of the drafter's logits grow as they are divided by the temperature; the noise does not.
        """
        sampled = temperature > 0
        scale = torch.where(sampled, temperature, 1.0).to(self._log.dtype)
        return self._log[sampled.long()].exp() * scale.unsqueeze(1)

    def learn(self, found: Candidates, temperature: Tensor, emitted: Tensor) -> None:
        """One step of stochastic Newton on the likelihood of the emitted tokens, in log sharpness.

        Args:
            found: what was proposed from.
            temperature: [B], as it was then.
            emitted: [B, P] int64 tokens that the target emitted at these positions; -1: none, which
                teaches nothing, as does a token that was no candidate.
        """
        sharp = self.of(temperature).unsqueeze(2)
        x = found.scores.to(sharp.dtype) * sharp
        share = x.softmax(-1)
        hit = found.ids == emitted.unsqueeze(2)
        judged = hit.any(-1)
        mean = (share * x).sum(-1)
        gradient = torch.where(judged, (x * hit).sum(-1) - mean, 0.0)  # d log-likelihood / d log s
        variance = (share * x.square()).sum(-1) - mean.square()
        kinds = (temperature > 0).long()
        zero = torch.zeros_like(self._log)
        gradient = zero.index_add(0, kinds, gradient)
        gained = zero.index_add(0, kinds, torch.where(judged, variance, 0.0))
        count = zero.index_add(0, kinds, judged.to(zero.dtype))
        self._information = self._information * _KEPT**count + gained
        self._log = (self._log + gradient / self._information).clamp(_LEAST, _MOST)


def rank(
    logits: Tensor,
    temperature: Tensor,
    noise: Callable[[Tensor], Tensor] | None,
    sharpness: Tensor,
    count: int,
    gains: Gains | None = None,
) -> Candidates:
    """Take each position's `count` likeliest tokens by q and rank them by perturbed score.

    Noise is looked up for these alone: hashing the whole vocabulary costs more than a small drafter's
    pass. Weights are normalised over the candidates, times the candidates' share of q; so at sharpness
    1 a greedy row's are log-probabilities over the full vocabulary.

    Args:
        logits: [B, P, V] float32 or wider.
        temperature: [B]; 0 for greedy rows.
        noise: ids [B, P, C] to the target's keyed noise for them, [B, P, C], 0 in greedy rows; None if
            the host knows that all rows are greedy.
        sharpness: [B, P].
        count: C, at most V.
        gains: a drafter's second look at a position's candidates: (position, token chosen before it
            [B] or None at the first, ids [B, C]) to what their logits gain, [B, C]. Positions are then
            gone through from left to right, each knowing the best candidate of the one before.
    """
    heat = torch.where(temperature > 0, temperature, 1.0).to(logits.dtype)
    y = logits if noise is None else logits / heat.view(-1, 1, 1)
    top, ids = _largest(y, count)
    share = (top.logsumexp(-1) - y.logsumexp(-1)).clamp(max=0.0)
    ids, order = ids.sort(dim=-1)  # so that equal scores stand in the order of their ids
    scores = top.gather(-1, order)
    if noise is not None:
        scores = scores + noise(ids).to(y.dtype)
    if gains is not None:
        before: Tensor | None = None
        for position in range(scores.shape[1]):
            mine = ids[:, position]
            gained = gains(position, before, mine).to(y.dtype) / heat.unsqueeze(1)
            scores[:, position] += gained
            before = mine.gather(1, scores[:, position].argmax(1, keepdim=True)).squeeze(1)
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    weights = (scores * sharpness.unsqueeze(2).to(y.dtype)).log_softmax(-1) + share.unsqueeze(2)
    return Candidates(ids=ids.gather(-1, order), scores=scores, weights=weights.to(torch.float32))


def _largest(y: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`topk`; on a CPU in two stages, which is four times as fast for few of many.

    The `count` largest numbers lie in the `count` blocks with the largest maxima.
    """
    blocks = y.shape[-1] // _BLOCK
    if not y.is_cpu or count > _BLOCK or blocks < 4 * count or y.shape[-1] % _BLOCK:
        return y.topk(count, dim=-1)
    cut = y.view(*y.shape[:-1], blocks, _BLOCK)
    chosen = cut.amax(-1).topk(count, dim=-1).indices
    kept = cut.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, _BLOCK)).flatten(-2)
    top, place = kept.topk(count, dim=-1)
    block = chosen.gather(-1, place.div(_BLOCK, rounding_mode="floor"))
    return top, block * _BLOCK + place % _BLOCK
