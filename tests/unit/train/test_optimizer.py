"""The optimiser: AdamW on masters, the network its rounding, resumed bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.train.optimizer import MasterAdamW, learning_rate


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1)).to(dtype)


def gradients(net: nn.Module, step: int) -> None:
    for i, parameter in enumerate(net.parameters()):
        generator = torch.Generator().manual_seed(100 * step + i)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def test_it_is_adamw_with_clipping() -> None:
    """Equal to torch's own optimiser and clipping in float64; vectors do not decay."""
    mine, other = network(torch.float64), network(torch.float64)
    optimizer = MasterAdamW(mine, weight_decay=0.3, clip=0.5)
    matrices = [p for p in other.parameters() if p.dim() > 1]
    vectors = [p for p in other.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    for step in range(5):
        gradients(mine, step)
        gradients(other, step)
        norm = optimizer.step(0.01)
        expected = nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        adam.step()
        torch.testing.assert_close(norm, expected)
        assert all(p.grad is None for p in mine.parameters())
    for a, b in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_small_steps_are_not_lost_to_rounding() -> None:
    """A bfloat16 network follows float32 masters, which move by less than its spacing."""
    net = network(torch.bfloat16)
    before = net[0].weight.detach().clone()
    optimizer = MasterAdamW(net, weight_decay=0.0, clip=1e9)
    for _ in range(200):
        gradients(net, 0)  # always the same direction
        optimizer.step(1e-5)
    moved = (net[0].weight.detach() - before).abs().float()
    assert float(moved.mean()) == pytest.approx(2e-3, rel=0.2)


def test_a_restored_optimiser_goes_on_bit_by_bit() -> None:
    """Masters, moments and step count come back."""
    one, two = network(torch.bfloat16), network(torch.bfloat16)
    first = MasterAdamW(one, weight_decay=0.1, clip=1.0)
    for step in range(4):
        gradients(one, step)
        first.step(0.01)
    second = MasterAdamW(two, weight_decay=0.1, clip=1.0)
    second.restore({k: v.clone() for k, v in first.state().items()}, 4)
    for step in range(4, 8):
        for net, optimizer in ((one, first), (two, second)):
            gradients(net, step)
            optimizer.step(0.01)
    for name, value in first.state().items():
        assert torch.equal(value, second.state()[name])
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_gradient_that_is_no_number_is_not_followed() -> None:
    """Weights stay finite; the norm says so."""
    net = network(torch.float64)
    optimizer = MasterAdamW(net, weight_decay=0.0, clip=1.0)
    gradients(net, 0)
    net[0].bias.grad[0] = torch.nan
    before = [p.detach().clone() for p in net.parameters()]
    assert not optimizer.step(0.1).isfinite()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))


def test_learning_rate() -> None:
    """Up in a line, down along a cosine to zero; held while the end is not known."""

    def at(step: int, steps: int | None) -> float:
        return learning_rate(step, highest=2.0, warmup=10, steps=steps)

    assert [at(0, 110), at(4, 110), at(9, 110)] == pytest.approx([0.2, 1.0, 2.0])
    assert [at(10, 110), at(60, 110), at(110, 110)] == pytest.approx([2.0, 1.0, 0.0])
    assert at(5000, None) == 2.0
    assert at(200, 110) == 0.0
