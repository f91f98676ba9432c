"""Soft cross-entropy through a head that is trained, in chunks: EAGLE-3's loss.

What a chain's step should say is what the target says there, restricted to the draft vocabulary:

    p(v)  =  softmax of the target's logits over the tokens that can be drafted
    loss  =  weighted mean over chains and steps k of  - sum over v of p(v) log q_k(v)

A step counts only if the text goes on that far and the token that the target finds likeliest can be
drafted at all (EAGLE-3, arXiv 2503.01840, and its published training code's mask). Step k weighs
exp(-k / gamma), 0.8^k in the paper, and D-PACE's weights where asked for (`losses.RowWeights`).

Logits of the draft head exist for a chunk of steps at a time and become the chunk's part of both
gradients at once; the target's distributions are kept, once for each place, in the networks' dtype.

Letters: P places, M chains, K steps, H hidden size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from paceline.ops.reference.fused import wide
from paceline.train.losses import RowWeights

_CHUNK_ROWS = 8192  # rows of logits that exist at once
Fused: TypeAlias = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aims:
    """What the target says at each place."""

    probs: Tensor  # [P, Vd] over the draft vocabulary
    best: Tensor  # [P] int64 draft row of its likeliest token; -1: that cannot be drafted


@torch.no_grad()
def aims(hidden: Tensor, head: Tensor, d2t: Tensor, rows: Tensor) -> Aims:
    """The target's distributions.

    Args:
        hidden: [P, Ht] the target's output after its final norm.
        head: [V, Ht] its head.
        d2t: [Vd] int64 token of each draft row.
        rows: [V] int64 draft row of each token; -1: it has none.
    """
    probs = hidden.new_empty(hidden.shape[0], d2t.shape[0])
    best = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    for start in range(0, hidden.shape[0], _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        logits = hidden[part] @ head.t()
        best[part] = rows[logits.argmax(-1)]
        probs[part] = logits.index_select(1, d2t).softmax(-1)
    return Aims(probs=probs, best=best)


def soft_loss(
    hidden: Tensor,
    head: Tensor,
    aim: Aims,
    places: Tensor,
    known: Tensor,
    weigh: RowWeights,
    *,
    fused: tuple[Fused, Fused] | None = None,
) -> Tensor:
    """Weighted mean of the cross-entropy, a scalar with gradients for both `hidden` and `head`.

    Args:
        hidden: [M, K, H] the draft's output after its final norm.
        head: [Vd, H].
        aim: what the target says.
        places: [M, K] int64 place whose token's successor the step predicts.
        known: [M, K] bool: the text goes on that far.
        weigh: how steps are weighed.
        fused: `scored` and `slopes`, compiled.
    """
    score, slope = fused or (scored, slopes)
    found = _SoftLoss.apply(  # type: ignore[no-untyped-call]
        hidden, head, aim, places, known, weigh, score, slope
    )
    return cast("Tensor", found)


def scored(logits: Tensor, probs: Tensor, at: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy [R] and the probability [R] of the target's likeliest token, both wide.

    Args:
        logits: [R, Vd] of the draft.
        probs: [P, Vd] of the target.
        at: [R] int64 rows of `probs`.
        best: [R] int64.
    """
    exact = logits.to(wide(logits.dtype))
    norm = exact.logsumexp(-1)
    entropy = norm - (probs[at].to(exact.dtype) * exact).sum(-1)
    own = exact.gather(1, best.unsqueeze(1)).squeeze(1)
    return entropy, (own - norm).exp()


def slopes(logits: Tensor, probs: Tensor, at: Tensor, weights: Tensor) -> tuple[Tensor]:
    """The loss's derivative by the logits, [R, Vd]: weights [R] times (q - p). See `scored`."""
    exact = logits.to(wide(logits.dtype))
    slope = (exact.softmax(-1) - probs[at].to(exact.dtype)) * weights.unsqueeze(1)
    return (slope.to(logits.dtype),)


class _SoftLoss(torch.autograd.Function):
    """Loss and gradients in one pass over the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        aim: Aims,
        places: Tensor,
        known: Tensor,
        weigh: RowWeights,
        score: Fused,
        slope: Fused,
    ) -> Tensor:
        chains, steps, size = hidden.shape
        exact = wide(hidden.dtype)
        grad = torch.empty_like(hidden)
        head_grad = torch.zeros_like(head, dtype=exact)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        mass = torch.zeros((), dtype=exact, device=hidden.device)
        many = max(1, _CHUNK_ROWS // steps)
        for start in range(0, chains, many):
            part = slice(start, min(start + many, chains))
            at = places[part].reshape(-1)
            best = aim.best[at]
            good = known[part] & (best.view_as(known[part]) >= 0)
            h = hidden[part].reshape(-1, size)
            logits = h @ head.t()
            entropy, own = score(logits, aim.probs, at, best.clamp(min=0))
            weights = weigh.weights(own.view_as(good).to(exact), good)
            total += (weights * entropy.view_as(good)).sum()
            mass += weights.sum()
            (by_logits,) = slope(logits, aim.probs, at, weights.view(-1))
            grad[part] = (by_logits @ head).view(-1, steps, size)
            head_grad += by_logits.t() @ h
        mass = mass.clamp(min=torch.finfo(exact).tiny)
        ctx.save_for_backward(grad, head_grad, mass)
        return total / mass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, head_grad, mass = ctx.saved_tensors
        factor = grads[0] / mass
        rest = (None,) * 6
        return grad * factor.to(grad.dtype), (head_grad * factor).to(grad.dtype), *rest
