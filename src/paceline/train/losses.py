"""Block loss: weighted cross-entropy of a block's rows through the target's frozen head, in chunks.

Row k of a block (k = 1 for the token after the anchor) weighs exp(-(k - 1) / gamma), since a row counts
only if all before it were right (DFlash, arXiv 2602.06036). D-PACE (arXiv 2605.18810) weighs by what a row
is worth now: with q_i the probability of the right token at row i and q'_i = (1 - alpha) q_i + alpha,

    w_j = sum over m >= j of the product over i <= m of q'_i      (no gradient)

which for alpha = 0 is the derivative of the expected accepted length by log q_j.

The head has tens of thousands of columns, so all logits never exist at once: a chunk's logits become the
chunk's part of the gradient at once, and only that, [M, H], is kept for the backward pass.

Letters: M blocks, R predicted rows of a block, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.train.settings import TrainSettings

_CHUNK_ROWS = 8192  # rows of logits that exist at once; 0.8 GB each in 16 bits at V = 49,152


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWeights:
    """How the rows of a block are weighed."""

    gamma: float  # 0: no decay
    dpace: bool
    alpha: float

    def weights(self, probs: Tensor, known: Tensor) -> Tensor:
        """Weights [M, R] of rows.

        Args:
            probs: [M, R] probability of the right token; any value where there is none.
            known: [M, R] bool: there is a right token. Rows after a block's end are not known.
        """
        out = known.to(probs.dtype)
        if self.gamma > 0:
            row = torch.arange(probs.shape[1], device=probs.device, dtype=probs.dtype)
            out = out * torch.exp(-row / self.gamma)
        return out * dpace_weights(probs, known, self.alpha) if self.dpace else out


def row_weights(settings: TrainSettings) -> RowWeights:
    """As a run's settings say."""
    return RowWeights(gamma=settings.gamma, dpace=settings.loss == "dpace", alpha=settings.alpha)


def dpace_weights(probs: Tensor, known: Tensor, alpha: float) -> Tensor:
    """D-PACE's weights [M, R]; see the module. Rows that are not known end a block."""
    smooth = ((1 - alpha) * probs + alpha) * known
    survive = smooth.cumprod(1)
    return survive.flip(1).cumsum(1).flip(1)


def block_loss(hidden: Tensor, head: Tensor, targets: Tensor, weigh: RowWeights) -> Tensor:
    """Weighted mean of the cross-entropy, a scalar.

    Args:
        hidden: [M, R, H] the draft network's output for the predicted rows.
        head: [V, H] the target's head; gets no gradient.
        targets: [M, R] int64 right tokens; -1: none.
        weigh: how rows are weighed.
    """
    loss = _BlockLoss.apply(hidden, head.detach(), targets, weigh)  # type: ignore[no-untyped-call]
    return cast("Tensor", loss)


class _BlockLoss(torch.autograd.Function):
    """Loss and gradient in one pass over the logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weigh: RowWeights
    ) -> Tensor:
        blocks, rows, size = hidden.shape
        wide = torch.promote_types(hidden.dtype, torch.float32)
        grad = torch.empty_like(hidden)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        mass = torch.zeros((), dtype=wide, device=hidden.device)
        step = max(1, _CHUNK_ROWS // rows)
        for start in range(0, blocks, step):
            part = slice(start, min(start + step, blocks))
            known = targets[part] >= 0
            right = targets[part].clamp(min=0)
            h = hidden[part].reshape(-1, size)
            probs = (h @ head.t()).softmax(-1)
            own = probs.gather(1, right.view(-1, 1)).view_as(right).to(wide)
            weights = weigh.weights(own, known)
            total += (weights * -own.clamp(min=torch.finfo(wide).tiny).log()).sum()
            mass += weights.sum()
            # d(-log p_right) / d h = p @ head - head[right]
            slope = (probs @ head - head[right.view(-1)]).view(*right.shape, size)
            grad[part] = slope * weights.unsqueeze(-1).to(slope.dtype)
        mass = mass.clamp(min=torch.finfo(wide).tiny)
        ctx.save_for_backward(grad, mass)
        return total / mass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad, mass = ctx.saved_tensors
        return grad * (grads[0] / mass).to(grad.dtype), None, None, None


@torch.no_grad()
def best_tokens(hidden: Tensor, head: Tensor) -> Tensor:
    """The likeliest token of each row: [M, R, H] -> [M, R] int64."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    parts = [
        (flat[i : i + _CHUNK_ROWS] @ head.t()).argmax(-1)
        for i in range(0, flat.shape[0], _CHUNK_ROWS)
    ]
    return torch.cat(parts).view(hidden.shape[:-1])
