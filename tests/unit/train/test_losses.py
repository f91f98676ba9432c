"""Block loss: value, gradient and weights against slow formulas; chunks change nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.train import losses
from paceline.train.losses import RowWeights, best_tokens, block_loss, dpace_weights

KINDS = [
    RowWeights(gamma=0.0, dpace=False, alpha=0.5),
    RowWeights(gamma=4.0, dpace=False, alpha=0.5),
    RowWeights(gamma=2.0, dpace=True, alpha=0.25),
]


def example(blocks: int = 6, rows: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head, targets; some blocks end early, one at once."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(blocks, rows, 8, generator=generator, dtype=torch.float64)
    head = torch.randn(13, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 13, (blocks, rows), generator=generator)
    targets[1, 2:] = -1
    targets[3, :] = -1
    return hidden, head, targets


def slow_weights(probs: list[float], known: list[bool], weigh: RowWeights) -> list[float]:
    """The formulas, row by row."""
    out = []
    for j in range(len(probs)):
        w = math.exp(-j / weigh.gamma) if weigh.gamma else 1.0
        if weigh.dpace:
            total = 0.0
            for m in range(j, len(probs)):
                product = 1.0
                for i in range(m + 1):
                    smooth = (1 - weigh.alpha) * probs[i] + weigh.alpha
                    product *= smooth if known[i] else 0.0
                total += product
            w *= total
        out.append(w if known[j] else 0.0)
    return out


def slow_loss(hidden: Tensor, head: Tensor, targets: Tensor, weigh: RowWeights) -> Tensor:
    """The definition, with gradients through autograd."""
    total, mass = hidden.new_zeros(()), 0.0
    for block, goal in zip(hidden, targets.tolist(), strict=True):
        logp = (block @ head.t()).log_softmax(-1)
        own = [logp[r, max(t, 0)] for r, t in enumerate(goal)]
        probs = [float(x.detach().exp()) for x in own]
        weights = slow_weights(probs, [t >= 0 for t in goal], weigh)
        total = total - sum((w * x for w, x in zip(weights, own, strict=True)), start=0.0)
        mass += sum(weights)
    return total / mass


@pytest.mark.parametrize("weigh", KINDS)
@pytest.mark.parametrize("chunk", [1, 8, 1000])
def test_loss_and_gradient_are_the_definition(
    monkeypatch: pytest.MonkeyPatch, weigh: RowWeights, chunk: int
) -> None:
    """The gradient made beside the logits is autograd's, whatever the chunks."""
    monkeypatch.setattr(losses, "_CHUNK_ROWS", chunk)
    hidden, head, targets = example()
    one, two = (hidden.clone().requires_grad_() for _ in range(2))
    found, expected = block_loss(one, head, targets, weigh), slow_loss(two, head, targets, weigh)
    torch.testing.assert_close(found, expected)
    (found * 3).backward()
    (expected * 3).backward()
    torch.testing.assert_close(one.grad, two.grad)


def test_dpace_weights_are_the_slope_of_the_expected_length() -> None:
    """Without smoothing, w_j is the derivative of the expected accepted length by log q_j."""
    logq = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).log()
    logq.requires_grad_()
    logq.exp().cumprod(1).sum().backward()
    known = torch.ones(5, 4, dtype=torch.bool)
    torch.testing.assert_close(dpace_weights(logq.detach().exp(), known, 0.0), logq.grad)


def test_rows_without_a_target_change_nothing() -> None:
    """A block that has ended neither adds to the loss nor gets a gradient."""
    hidden, head, targets = example()
    x = hidden.clone().requires_grad_()
    loss = block_loss(x, head, targets, KINDS[1])
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad[3], torch.zeros_like(x.grad[3]))
    assert torch.equal(x.grad[1, 2:], torch.zeros_like(x.grad[1, 2:]))
    kept = [0, 1, 2, 4, 5]
    torch.testing.assert_close(loss, block_loss(hidden[kept], head, targets[kept], KINDS[1]))


def test_no_target_at_all_is_no_division_by_zero() -> None:
    """A batch of nothing but ended blocks has loss 0 and gradient 0."""
    hidden, head, targets = example()
    x = hidden.requires_grad_()
    loss = block_loss(x, head, targets.fill_(-1), KINDS[2])
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert x.grad is not None
    assert not x.grad.any()


def test_best_tokens_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest token of each row, whatever the chunks."""
    hidden, head, _ = example()
    monkeypatch.setattr(losses, "_CHUNK_ROWS", 5)
    assert torch.equal(best_tokens(hidden, head), (hidden @ head.t()).argmax(-1))
