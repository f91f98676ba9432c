"""Candidates: the likely tokens of each position of a block, ranked as the target will rank them.

The target emits the argmax of its tempered log-probabilities plus noise keyed by position and token.
A drafter that adds the *same* noise to its own makes the same choice wherever the two distributions
agree well enough (shared-noise coupling, arXiv 2408.07978), and its second choice is then the likeliest
alternative: perturbed top-k. At temperature 0 there is no noise, and this is plain top-k.

Survival. Let x be a candidate's perturbed score. If the errors of x are Gumbel distributed with scale
1 / sharpness, the chance that a candidate is the target's choice is its share of softmax(sharpness * x)
(Luce's choice rule): a clear gap to the next candidate means near certainty, a small one means nearly
equal chances. At temperature 0 and sharpness 1 this is the drafter's own probability.

How sharp the scores really are differs by drafter, by position and between greedy and sampled rows. And
it differs by what stands before: a block's distributions do not know which token is chosen to their
left, so they are about the path that the drafter holds for likeliest, the *spine*; after any other token
the next distribution is right far less often. So `Calibration` learns a sharpness for each of these from
every emitted token, by maximum likelihood, on the device.

Not here: which candidates are proposed (`dflash.py`, `ddtree.py`).

Letters: B rows, P positions of a block that are proposed, V vocabulary, C candidates. A 2 in a shape
is on the spine, off the spine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import TypeAlias

import torch
from torch import Tensor

from paceline import ops
from paceline.core.device import rows_of_logits
from paceline.ops import drafts
from paceline.ops.reference.candidates import by_row, heat, sharpness

_CHUNK = 128  # positions whose logits exist at the same time on a CPU
SAMPLED = 128  # candidates of a sampled row: the noise may lift any of them to the top
_GREEDY_SHARPNESS = 1.0  # a drafter trained with cross-entropy means what it says
# Simulated (V = 2,000, entropies 2.6 to 5.7 nats): the best value is 3.3 at KL(p||q) 0.1, 2 at 0.2 to
# 0.25, 1.7 at 0.4, 1.2 at 1.
_SAMPLED_SHARPNESS = 1.5
_LEAST, _MOST = math.log(0.1), math.log(10.0)  # log sharpness stays between these
_KEPT = 0.998  # of what was learned, per judged token
_PRIOR = 20.0  # judged tokens of information that the starting value is worth
_NOTED = 8  # rows of steps that a CPU learns from at once
_OFF_SPINE = 0.5  # of the sharpness on the spine, to begin with

_NO_ID = 1 << 62  # above every token

Gains: TypeAlias = Callable[[int, "Tensor | None", Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Each position's likely tokens, best first; among equals the lowest id."""

    ids: Tensor  # [B, P, C] int64
    scores: Tensor  # [B, P, C] perturbed scores, not increasing
    share: Tensor  # [B, P] log of the candidates' part of q, all together
    weights: Tensor  # [B, P, C] float32 log survival after the spine, given that it is right
    off_spine: Tensor  # [B, P, C] the same after any other path

    @staticmethod
    def cat(parts: Sequence[Candidates]) -> Candidates:
        """The rows of one after those of the other."""
        if len(parts) == 1:
            return parts[0]
        return Candidates(
            **{f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Candidates)}
        )


class Calibration:
    """What gaps between scores mean, and how much of the target's choice the candidates hold.

    By position, on and off the spine, for greedy and for sampled rows.

    Args:
        num_positions: P.
        device: where the numbers live; nothing here is read by the host.
    """

    def __init__(self, num_positions: int, device: torch.device) -> None:
        kinds, contexts = (_GREEDY_SHARPNESS, _SAMPLED_SHARPNESS), (1.0, _OFF_SPINE)
        start = torch.tensor([kind * off for kind in kinds for off in contexts], device=device)
        self._log = start.log().unsqueeze(1).expand(4, num_positions).clone()  # [2 kinds x 2, P]
        self._information = torch.full_like(self._log, _PRIOR)
        self._held = torch.full_like(self._log, _PRIOR)  # emitted tokens that were candidates
        self._claimed = torch.full_like(self._log, _PRIOR)  # how many should have been
        self._num_learned = 0  # rows of steps that were noted and learned from
        # By number of candidates: steps that nothing was learned from so far.
        self._noted: dict[int, list[tuple[Candidates, Tensor, Tensor]]] = {}

    def at(self, position: int) -> Calibration:
        """A look at one position alone, P = 1: the same memory."""
        view = copy(self)
        for name in ("_log", "_information", "_held", "_claimed"):
            setattr(view, name, getattr(self, name)[:, position : position + 1])
        return view

    def sharpness(self, temperature: Tensor) -> Tensor:
        """Sharpness [B, 2, P] for rows of these temperatures [B]."""
        return sharpness(self._log, temperature)

    def reach(self, temperature: Tensor) -> Tensor:
        """Log factor [B, 2, P] on the candidates' share of q."""
        return by_row((self._held / self._claimed).log(), temperature)

    def weigh(
        self,
        top: Tensor,
        ids: Tensor,
        mass: Tensor,
        noise: Tensor | None,
        temperature: Tensor,
    ) -> Candidates:
        """Candidates of each position's largest log-probabilities, perturbed by `noise`.

        Args:
            top: [B, P, C] log-probabilities up to a constant, tempered.
            ids: [B, P, C] int64.
            mass: [B, P] `logsumexp` over the vocabulary.
            noise: [B, P, C], or None for nothing.
            temperature: [B].
        """
        given = top, ids, mass, noise, temperature
        tables = self._log, self._held, self._claimed
        ids, scores, share, weights, off = ops.rank_candidates(*given, *tables)
        return Candidates(ids=ids, scores=scores, share=share, weights=weights, off_spine=off)

    def learn(self, found: Candidates, temperature: Tensor, emitted: Tensor) -> None:
        """Learn from what was emitted, in place: a captured step keeps the memory that it saw.

        Args:
            found: what was proposed from.
            temperature: [B], as it was then.
            emitted: [B, P] int64 tokens that the target emitted at these positions; -1: none, which
                teaches nothing. A token that was no candidate teaches about `reach` alone.
        """
        tables = self._log, self._information, self._held, self._claimed
        given = found.ids, found.scores, found.share, temperature, emitted
        ops.learn(*given, tables, _KEPT, (_LEAST, _MOST))

    def note(self, found: Candidates, temperature: Tensor, emitted: Tensor) -> None:
        """`learn`, on a CPU from several steps at once.

        There a step's many small operators cost more than what newer numbers are worth, once they are no
        large part of all: what waits is at most an eighth of what was learned from.
        """
        if not emitted.is_cpu:
            self.learn(found, temperature, emitted)
            return
        kept = self._noted.setdefault(found.ids.shape[2], [])
        kept.append((found, temperature, emitted))
        waiting = sum(rows.shape[0] for _, rows, _ in kept)
        if waiting < min(_NOTED, self._num_learned // _NOTED):
            return
        self._num_learned += waiting
        parts = list(zip(*kept, strict=True))
        kept.clear()
        self.learn(Candidates.cat(parts[0]), torch.cat(parts[1]), torch.cat(parts[2]))


def rank(
    logits: Tensor,
    temperature: Tensor,
    noise: Callable[[Tensor], Tensor] | None,
    calibration: Calibration,
    count: int,
    gains: Gains | None = None,
) -> Candidates:
    """Take each position's `count` likeliest tokens by q and rank them by perturbed score.

    Noise is looked up for these alone: hashing the whole vocabulary costs more than a small drafter's
    pass. Weights are normalised over the candidates, times the candidates' share of q; so before
    anything was learned a greedy row's are log-probabilities over the full vocabulary.

    Args:
        logits: [B, P, V] float32 or wider.
        temperature: [B]; 0 for greedy rows.
        noise: ids [B, P, C] to the target's keyed noise for them, [B, P, C], 0 in greedy rows; None if
            the host knows that all rows are greedy.
        calibration: of P positions.
        count: C, at most V.
        gains: a drafter's second look at a position's candidates: (position, token chosen before it
            [B] or None at the first, ids [B, C]) to what their logits gain, [B, C]. Positions are then
            gone through from left to right, each knowing the best candidate of the one before.
    """
    top, ids, mass = drafts.largest(logits, None if noise is None else temperature, count)
    perturbs = None if noise is None else noise(ids)
    if gains is not None:
        perturbs = _followed(top, ids, perturbs, heat(temperature, top.dtype), gains)
    return calibration.weigh(top, ids, mass, perturbs, temperature)


def batches(num_rows: int, positions: int, vocab_size: int, device: torch.device) -> list[slice]:
    """Rows whose logits exist at the same time, in parts of nearly one size."""
    most = _CHUNK
    if device.type == "cuda":
        most = max(most, rows_of_logits(device, vocab_size))
    parts = -(-num_rows // max(1, most // positions))
    step = -(-num_rows // max(1, parts))
    return [slice(at, at + step) for at in range(0, num_rows, max(1, step))]


def _followed(
    top: Tensor, ids: Tensor, noise: Tensor | None, scale: Tensor, gains: Gains
) -> Tensor:
    """Noise [B, P, C] and, from left to right, what candidates gain by the best one before them."""
    added = torch.zeros_like(top) if noise is None else noise.to(top.dtype)
    before: Tensor | None = None
    for position in range(top.shape[1]):
        mine = ids[:, position]
        added[:, position] += gains(position, before, mine).to(top.dtype) / scale.unsqueeze(1)
        scores = top[:, position] + added[:, position]
        # The lowest id of the best ones; of all, where none is a number.
        best = ~(scores < scores.amax(1, keepdim=True))
        before = torch.where(best, mine, _NO_ID).amin(1)
    return added
