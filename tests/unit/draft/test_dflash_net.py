"""DFlash's network: three ways to make context keys, borrowed ends, long rotations."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.draft.base import TargetInfo
from paceline.draft.dflash_checkpoint import load, load_plain
from paceline.draft.dflash_net import DFlashNet
from paceline.models import CausalLM
from tests import tiny, tiny_drafters
from tests.dense import DenseAttend, whole

TOKENS = [(5 * i * i + 2 * i) % 90 + 3 for i in range(30)]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target's folder."""
    return tiny.write_tiny(tmp_path_factory.mktemp("target"), "llama", seed=4)


def parts(
    base: Path, folder: Path, dtype: torch.dtype = torch.float64, **options: object
) -> tuple[CausalLM, TargetInfo, DFlashNet]:
    tiny_drafters.write_dflash(folder, base, **options)
    net, info = tiny_drafters.target_of(base, dtype)
    return net, info, load(folder, info)


def assert_same(
    one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]], rtol: float
) -> None:
    for (k, v), (k2, v2) in zip(one, other, strict=True):
        torch.testing.assert_close(k, k2, rtol=rtol, atol=rtol)
        torch.testing.assert_close(v, v2, rtol=rtol, atol=rtol)


def assert_paths_agree(net: DFlashNet, features: Tensor, positions: Tensor, rtol: float) -> None:
    """All ways to make context keys and values, against the one that takes a token at a time."""
    truth = net.context(features, positions, "token")
    assert_same(net.context(features, positions, "layer"), truth, rtol)
    assert_same(net.context(features, positions, "stacked"), truth, rtol)
    assert_same(net.context(features, positions), truth, rtol)


PRECISIONS = pytest.mark.parametrize(
    "dtype, rtol", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.04)]
)


@pytest.mark.parametrize("bias", [False, True])
@PRECISIONS
@pytest.mark.parametrize("packed", [True, False])
@torch.inference_mode()
def test_context_paths_agree(
    base: Path, tmp_path: Path, dtype: torch.dtype, rtol: float, bias: bool, packed: bool
) -> None:
    """Token by token, by layer and stacked give the same keys and values, packed or plain, with
    biases, positions in any order, and no tokens at all.
    """
    model, info, net = parts(base, tmp_path, dtype, attention_bias=bias, num_hidden_layers=3)
    if not packed:
        net = load_plain(tmp_path, info, dtype=dtype)
        net.stack()
    features = tiny_drafters.features_of(model, TOKENS, net.config.target_layer_ids)
    positions = torch.randperm(200, generator=torch.Generator().manual_seed(0))[: len(TOKENS)]
    assert_paths_agree(net, features, positions, rtol)
    for path in ("token", "layer", "stacked"):
        for k, v in net.context(features[:0], positions[:0], path):
            assert k.shape == v.shape == (0, 2, 16)


@pytest.mark.parametrize("place", [1, 4_096, 65_536])
@PRECISIONS
@torch.inference_mode()
def test_context_paths_agree_far_into_a_text(
    base: Path, tmp_path: Path, dtype: torch.dtype, rtol: float, place: int
) -> None:
    """At these places and after them as at the first ones; where a key lies is seen in it, and not
    in its value.
    """
    model, _, net = parts(base, tmp_path, dtype, max_position_embeddings=131_072)
    features = tiny_drafters.features_of(model, TOKENS, net.config.target_layer_ids)
    positions = place + torch.arange(len(TOKENS))
    assert_paths_agree(net, features, positions, rtol)
    found = net.context(features, positions)
    for (k, v), (k0, v0) in zip(found, net.context(features, positions - place), strict=True):
        assert float((k - k0).abs().amax((1, 2)).min()) > 0.1
        torch.testing.assert_close(v, v0, rtol=0, atol=0)


def test_the_path_is_chosen_by_size_and_gradient(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens go stacked, many by layer; with gradients always by layer, and they arrive."""
    model, info, net = parts(base, tmp_path)
    features = tiny_drafters.features_of(model, TOKENS, net.config.target_layer_ids)
    positions = torch.arange(len(TOKENS))
    taken: list[str] = []
    for name in ("_stacked_context", "_layer_context"):
        real = getattr(DFlashNet, name)

        def spy(self: DFlashNet, *args: object, name: str = name, real: object = real) -> object:
            taken.append(name)
            return real(self, *args)

        monkeypatch.setattr(DFlashNet, name, spy)
    with torch.inference_mode():
        net.context(features, positions)
        assert taken == ["_stacked_context"]
        monkeypatch.setattr("paceline.draft.dflash_net._STACKED_BYTES", 100)
        net.context(features, positions)
    assert taken[1:] == ["_layer_context"] * 2
    plain = load_plain(tmp_path, info, dtype=torch.float32).requires_grad_()
    plain.stack()
    with torch.enable_grad():
        sum(k.square().sum() + v.sum() for k, v in plain.context(features, positions)).backward()
    layer = plain.layers[1].attention
    split = layer.qkv.splits[0]
    assert bool((layer.qkv.weight.grad[split:] != 0).all())
    assert bool((layer.qkv.weight.grad[:split] == 0).all()), "queries have no part in context"
    assert plain.fc.weight.grad is not None
    assert plain.hidden_norm.weight.grad is not None


def test_embedding_and_head_are_borrowed(base: Path, tmp_path: Path) -> None:
    """The target's table is never among the drafter's parameters, nor saved or moved with them."""
    _, _, net = parts(base, tmp_path)
    sizes = {tuple(p.shape) for p in net.parameters()}
    assert not any(97 in shape for shape in sizes)
    assert set(net.state_dict()) == {name for name, _ in net.named_parameters()}


@torch.inference_mode()
def test_positions_beyond_the_drafter_s_own(base: Path, tmp_path: Path) -> None:
    """Angles at positions past max_position_embeddings (128) are those that a longer configuration
    gives, up to the end of the target's window and a block beyond; a longer target changes none.
    """
    for rope in (None, {"rope_type": "yarn", "factor": 4.0}):
        options = {"max_position_embeddings": 128, "rope_scaling": rope}
        model, info, net = parts(base, tmp_path / f"{rope is None}", **options)
        longer = dataclasses.replace(
            info, config=dataclasses.replace(info.config, max_position=1000)
        )
        other = load(tmp_path / f"{rope is None}", longer)
        features = tiny_drafters.features_of(model, TOKENS, net.config.target_layer_ids)
        positions = torch.arange(len(TOKENS)) + 256 + 4 - len(TOKENS)
        assert int(positions[-1]) == 256 + net.config.block_size - 1
        assert_same(
            net.context(features, positions), other.context(features, positions), rtol=1e-12
        )


def test_rope_is_the_checkpoint_s_not_the_table_s(base: Path, tmp_path: Path) -> None:
    """A yarn drafter without an original length scales from its own window, whatever the target's:
    its table begins with the table of a target as short as itself.
    """
    rope = {"rope_type": "yarn", "factor": 4.0}
    _, info, net = parts(base, tmp_path, max_position_embeddings=128, rope_scaling=rope)
    short = dataclasses.replace(info, config=dataclasses.replace(info.config, max_position=64))
    table = load(tmp_path, short).rope.cos_sin
    assert table.shape[0] == 128 + 4
    assert net.rope.cos_sin.shape[0] == 256 + 4
    assert torch.equal(net.rope.cos_sin[: table.shape[0]], table)


@torch.inference_mode()
def test_the_last_layer_s_tap(base: Path) -> None:
    """The tap of the last layer is the stream before the final norm."""
    model, _ = tiny_drafters.target_of(base)
    out = model(whole(TOKENS), DenseAttend(), (1,))
    torch.testing.assert_close(model.norm(out.aux), out.hidden, rtol=1e-10, atol=1e-10)


@torch.inference_mode()
def test_shifted_taps_are_another_input(base: Path, tmp_path: Path) -> None:
    """Features taken one layer off, which nothing crashes on, change every key: what a comparison of
    cache rows with a fresh prefill notices.
    """
    model, _, net = parts(base, tmp_path, dflash_config={"target_layer_ids": [0]})
    right, wrong = (tiny_drafters.features_of(model, TOKENS, taps) for taps in ((0,), (1,)))
    positions = torch.arange(len(TOKENS))
    for (k, v), (k2, v2) in zip(
        net.context(right, positions), net.context(wrong, positions), strict=True
    ):
        assert float((k - k2).abs().amax(-1).min()) > 1e-3
        assert float((v - v2).abs().amax(-1).min()) > 1e-3
