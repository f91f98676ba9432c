"""EAGLE-3's network against the formulas, in each arrangement of norms that a checkpoint may have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.batch import AttnSite
from paceline.core.config import RopeConfig
from paceline.draft.base import TargetInfo
from paceline.draft.eagle3_checkpoint import load, load_plain
from paceline.draft.eagle3_config import Eagle3Config
from paceline.draft.eagle3_net import Eagle3Net
from tests import tiny, tiny_eagle3
from tests.dense import DenseAttend, target_of
from tests.oracle import eagle3 as oracle

KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "norm_before_fc": {"norm_before_fc": True, "norm_before_residual": True},
    "fc_norm, norm_output": {"fc_norm": True, "norm_output": True},
    "biases, scale": {"qkv_bias": True, "logit_scale": 0.3},
    "narrow": {"hidden_size": 48, "target_hidden_size": 64},
}
COUNT = 9


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target's folder."""
    return tiny.write_tiny(tmp_path_factory.mktemp("target"), "llama", seed=4)


@pytest.fixture(scope="session")
def info(base: Path) -> TargetInfo:
    """What it lends, in float64."""
    return target_of(base)[1]


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_it_computes_the_formulas(base: Path, tmp_path: Path, info: TargetInfo, kind: str) -> None:
    """Projection, layer, logits and feedback equal the definition; `context` is what is cached."""
    options = KINDS[kind]
    folder = tiny_eagle3.write_eagle3(tmp_path, base, **options)
    net = load(folder, info)
    tensors = {
        n: t.double() if t.is_floating_point() else t
        for n, t in load_file(folder / "model.safetensors").items()
    }
    config = {"rms_norm_eps": 1e-6, "head_dim": 16, "num_attention_heads": 4, "rope_theta": 1e4}
    config |= options
    taps, ids = draw(COUNT, 192), torch.arange(COUNT) * 7 % 97
    features = net.project(taps)
    torch.testing.assert_close(features, oracle.project(tensors, config, taps))
    embeds = net.embed(ids)
    if "embed_tokens.weight" in tensors:
        torch.testing.assert_close(embeds, tensors["embed_tokens.weight"][ids])
    else:
        torch.testing.assert_close(embeds, info.embed(ids))
    positions = torch.arange(COUNT) + 30
    attend = Kept()
    output = net.layer(embeds, features, positions, attend)
    sees = torch.ones(COUNT, COUNT, dtype=torch.bool).tril()
    wanted = oracle.layer(tensors, config, embeds, features, positions, sees)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(net.logits(output), oracle.logits(tensors, config, wanted))
    fed = oracle.norm(wanted, tensors["norm.weight"], config)
    torch.testing.assert_close(net.fed_back(output), fed if net.config.norm_output else wanted)
    for mine, cached in zip(net.context(embeds, features, positions), attend.kept, strict=True):
        torch.testing.assert_close(mine, cached)


class Kept(DenseAttend):
    """Dense attention that keeps what it was given to cache."""

    def heads(self, site: AttnSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kept = (k, v)
        return super().heads(site, q, k, v)


def test_positions_are_relative(base: Path, tmp_path: Path, info: TargetInfo) -> None:
    """Whether entry i is rotated by i or by i + 1 makes no difference: projects differ in this."""
    net = load(tiny_eagle3.write_eagle3(tmp_path, base), info)
    embeds, features = net.embed(torch.arange(COUNT)), draw(COUNT, 64)
    one, other = (
        net.layer(embeds, features, torch.arange(COUNT) + shift, DenseAttend()) for shift in (0, 1)
    )
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # angles are float32


def test_gradients_arrive_everywhere(base: Path, tmp_path: Path, info: TargetInfo) -> None:
    """Two unrolled steps train every parameter, and nothing of the target's."""
    folder = tiny_eagle3.write_eagle3(tmp_path, base, norm_output=True, fc_norm=True)
    net = load_plain(folder, info, dtype=torch.float64).requires_grad_()
    text = net.d2t[torch.arange(COUNT + 3) * 5 % 60]
    tiny_eagle3.unrolled_loss(net, text, draw(COUNT + 3, 192), 2).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name
    assert "embedding" not in dict(net.named_children())


def test_the_rotary_table_is_as_long_as_the_target_s(
    base: Path, tmp_path: Path, info: TargetInfo
) -> None:
    """A drafter made for 16 positions (public ones say 2048) serves the target's whole window, with
    the angles that it was trained with.
    """
    net = load(tiny_eagle3.write_eagle3(tmp_path, base, max_position_embeddings=16), info)
    assert net.rope.cos_sin.shape[0] > info.config.max_position
    alone = Eagle3Net(net.config, None)
    known = alone.rope.cos_sin.shape[0]
    assert torch.equal(alone.rope.cos_sin, net.rope.cos_sin[:known])


def test_a_network_without_a_target_starts_with_the_first_tokens() -> None:
    """Training may build one from a configuration alone; the maps are a choice of their own."""
    config = tiny_config()
    net = Eagle3Net(config, None)
    assert net.d2t.tolist() == list(range(20))
    assert net.t2d.nonzero().flatten().tolist() == list(range(20))
    chosen = torch.arange(20) * 3 + 1
    net.set_vocabulary(chosen)
    assert torch.equal(net.d2t, chosen)
    assert torch.equal(net.t2d.nonzero().flatten(), chosen)


def tiny_config() -> Eagle3Config:
    return Eagle3Config(
        hidden_size=32,
        target_hidden_size=32,
        intermediate_size=40,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        vocab_size=64,
        draft_vocab_size=20,
        aux_layers=(0, 1, 1),
        max_position=32,
        rope=RopeConfig(),
    )
