"""Batch-invariant mode: what is chosen, what is refused, and who goes through which products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import models
from paceline.attention.cpu import CpuAttention
from paceline.attention.tiled import TiledAttention
from paceline.core.errors import ConfigError
from paceline.engine import invariance
from paceline.engine.fused_ops import OpsPass, Product
from paceline.engine.invariance import InvariantProduct, arithmetic, refusal
from paceline.engine.runner import ModelRunner
from paceline.kv.layout import Heads
from tests import tiny
from tests.engine.test_fused import CPU, PAGE, network, passes, pool_for

LAYOUT = Heads(2, 64)
CUDA = torch.device("cuda")


class Serves(TiledAttention):
    """As the backend of the mode on a GPU."""


class Headed(models.CausalLM):
    """Has a head of its own."""

    def head(self, hidden: Tensor) -> Tensor:
        return hidden


def chosen_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Every choice of a backend is `Serves`; what was asked of each."""
    asked: list[bool] = []

    def choose(*_: Any, invariant: bool) -> tuple[Serves, tuple[str, ...]]:
        asked.append(invariant)
        return Serves(), ("a note",)

    monkeypatch.setattr(invariance, "choose", choose)
    return asked


def test_on_a_cpu_products_are_as_ever(tmp_path: Path) -> None:
    """There the usual ones promise it, asked or not."""
    net = network(tiny.write_tiny(tmp_path), torch.float32).net
    for asked in (None, False, True):
        found = arithmetic(asked, net, LAYOUT, CPU, torch.float32, PAGE)
        assert found.invariant
        assert found.product is Product
        assert isinstance(found.backend, CpuAttention | TiledAttention)
        assert found.notes[-1].startswith("batch-invariant: yes")


def test_on_a_gpu_it_is_for_who_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, products and head are others then, and the start-up notes say it either way."""
    net = network(tiny.write_tiny(tmp_path), torch.float64).net
    asked = chosen_on_a_gpu(monkeypatch)
    monkeypatch.setattr(Serves, "invariant", False)
    usual = arithmetic(None, net, LAYOUT, CUDA, torch.bfloat16, 16)
    assert not usual.invariant
    assert usual.product is Product
    assert usual.head == net.head
    assert usual.notes[-1].startswith("batch-invariant: no (Serves)")
    assert "--batch-invariant" in usual.notes[-1]
    found = arithmetic(True, net, LAYOUT, CUDA, torch.bfloat16, 16)
    assert found.invariant
    assert found.product is InvariantProduct
    assert found.head != net.head
    assert found.notes == (
        "a note",
        "batch-invariant: yes, outputs equal plain decoding bit by bit",
    )
    assert asked == [False, True]


def test_what_cannot_be_says_what_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights, other passes and heads, other dtypes: what was asked, what is possible, what to do."""
    folder = tiny.write_tiny(tmp_path, "llama")
    packed = network(folder, torch.bfloat16, "8bit").net
    plain = network(folder, torch.float64).net  # what a GPU has in 16 bits: nothing is packed
    assert refusal(plain) is None
    assert refusal(packed) == "weights are packed"
    monkeypatch.setattr(type(plain), "decoder", lambda _: "it has a pass of its own")
    assert "it has a pass of its own" in (refusal(plain) or "")
    with pytest.raises(
        ConfigError, match=r"batch_invariant was asked for, and no .*float64.*leave"
    ):
        arithmetic(True, plain, LAYOUT, CPU, torch.float64, PAGE)
    chosen_on_a_gpu(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"asked for, but .*pass of its own; it is possible.*leave"
    ):
        arithmetic(True, plain, LAYOUT, CUDA, torch.bfloat16, 16)


def test_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    """Nobody knows how it multiplies."""
    plain = network(tiny.write_tiny(tmp_path), torch.float64).net
    other = Headed(plain.config, dtype=torch.float64, device="cpu")
    assert refusal(other) == "Headed has a head of its own"


class Counted(Product):
    """Counts its products."""

    __slots__ = ()
    calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return Product.__call__(self, x)

    def add_rms_norm(self, *args: Any) -> tuple[Tensor, Tensor]:
        Counted.calls += 1
        return Product.add_rms_norm(self, *args)

    def swiglu(self, x: Tensor) -> Tensor:
        Counted.calls += 1
        return Product.swiglu(self, x)


def test_every_product_of_a_pass_is_the_one_that_was_chosen(tmp_path: Path) -> None:
    """Four a layer, in verifies and prompts alike, and the head's."""
    loaded = network(tiny.write_tiny(tmp_path, "qwen2"), torch.float64)
    pool = pool_for(loaded, torch.float64)
    decoder = loaded.net.decoder()
    assert not isinstance(decoder, str)
    backend = arithmetic(None, loaded.net, pool.layout, CPU, torch.float64, PAGE).backend
    for batch in passes().values():
        Counted.calls = 0
        with torch.inference_mode():
            OpsPass(decoder, pool, backend, Counted).forward(batch, ())
        assert Counted.calls == 4 * len(decoder.layers)
    runner = ModelRunner(loaded.net, pool, backend, head=lambda hidden: hidden + 1)
    assert runner.head(torch.zeros(2, 3)).eq(1).all()
