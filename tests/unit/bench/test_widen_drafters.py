from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.bench.widen import widening
from paceline.bench.widen_drafters import drafter_part
from paceline.bench.widen_shape import Shape
from paceline.cli import main
from paceline.core.errors import ConfigError, ModelError
from paceline.draft import dflash_checkpoint, eagle3_checkpoint
from paceline.draft.eagle3_net import Eagle3Net
from paceline.models import read_config, resolve
from tests import tiny
from tests.dense import features_of, target_of
from tests.tiny_drafters import DFLASH2, blocks, write_dflash
from tests.tiny_eagle3 import UnrolledAttend, write_eagle3
from tests.widened import SIZES, widen

TEXT = [(5 * i * i + 11 * i) % 94 + 3 for i in range(37)]
STARTS = [3, 8, 17, 30]
# Variants of each network: what a checkpoint may choose that has to do with sizes.
DFLASH: dict[str, dict[str, Any]] = {
    "plain": {},
    "as-the-target": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
    "biases": {"attention_bias": True},
    "causal": {"is_causal": True},
    "second": DFLASH2,
    "scaled": {"dflash_config": {"input_embedding_scale": 2.0, "output_multiplier": 0.5}},
}
EAGLE3: dict[str, dict[str, Any]] = {
    "plain": {},
    "fc_norm": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True, "norm_before_residual": True},
    "biases": {"qkv_bias": True},
    "whole-vocabulary": {"draft_vocab_size": 97},
    "own-width": {"hidden_size": 48, "target_hidden_size": 64},
    "safeai": {"layout": "safeai"},
    "speculators": {"layout": "speculators"},
}
DEEP = {"num_hidden_layers": 7}  # so that the taps where a file names none are layers


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target."""
    return tiny.write_tiny(tmp_path_factory.mktemp("small") / "llama", "llama", seed=2, **DEEP)


def dflash_logits(target: Path, folder: Path) -> Tensor:
    """Logits of blocks at some places of a text."""
    model, info = target_of(target)
    net = dflash_checkpoint.load(folder, info)
    features = features_of(model, TEXT, net.config.target_layer_ids)
    with torch.inference_mode():
        hidden = blocks(net, TEXT, STARTS, features)
        found = net.logits(hidden)
        if net.selector is None:
            return found
        ids = torch.arange(97).expand(len(STARTS), -1)
        before = torch.tensor([TEXT[at] for at in STARTS])
        return found[:, 1] + net.selector.gains(net.selector.projected(hidden)[:, 1], before, ids)


def eagle3_logits(target: Path, folder: Path) -> tuple[Tensor, Tensor]:
    """Logits of three steps, each fed by the one before, and the map of the vocabulary."""
    model, info = target_of(target)
    net: Eagle3Net = eagle3_checkpoint.load(folder, info)
    aux = features_of(model, TEXT, net.config.aux_layers)
    count, attend, found = len(TEXT) - 4, UnrolledAttend(), []
    with torch.inference_mode():
        feature = net.project(aux[:count])
        for step in range(3):
            embeds = net.embed(torch.tensor(TEXT[1 + step : 1 + step + count]))
            out = net.layer(embeds, feature, torch.arange(count) + step, attend)
            found.append(net.logits(out))
            feature = net.fed_back(out)
    return torch.stack(found), net.d2t


@pytest.mark.parametrize("variant", DFLASH)
def test_dflash_drafts_what_it_drafted(small: Path, tmp_path: Path, variant: str) -> None:
    """Every block has the small drafter's logits, from the widened target's features and head."""
    folder = write_dflash(tmp_path / "drafter", small, **DFLASH[variant])
    expected = dflash_logits(small, folder)
    wide = widen(small, tmp_path / "wide", folder, num_layers=9)
    found = dflash_logits(wide / "target", wide / "drafter")
    assert expected.std() > 0.3, "flat logits would be equal to anything"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("variant", EAGLE3)
def test_eagle3_drafts_what_it_drafted(small: Path, tmp_path: Path, variant: str) -> None:
    """Every step has the small drafter's logits, over the same draft vocabulary; in each layout."""
    folder = write_eagle3(tmp_path / "drafter", small, **EAGLE3[variant])
    expected, ids = eagle3_logits(small, folder)
    wide = widen(small, tmp_path / "wide", folder, num_layers=9)
    found, wide_ids = eagle3_logits(wide / "target", wide / "drafter")
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert torch.equal(wide_ids, ids)
    config = json.loads((wide / "drafter" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"], "one layout is written"


@pytest.mark.parametrize("variant", ["plain", "fc_norm", "norm_before_fc", "biases"])
def test_eagle3_takes_silent_channels(small: Path, tmp_path: Path, variant: str) -> None:
    """Where the target's width is no multiple, its norms are scaled as the target's are."""
    folder = write_eagle3(tmp_path / "drafter", small, **EAGLE3[variant])
    expected, _ = eagle3_logits(small, folder)
    wide = widen(small, tmp_path / "wide", folder, num_layers=9, hidden_size=156)
    found, _ = eagle3_logits(wide / "target", wide / "drafter")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_several_drafters_lie_beside_one_target(small: Path, tmp_path: Path) -> None:
    """Each under its folder's name."""
    folders = [
        write_dflash(tmp_path / "one", small),
        write_eagle3(tmp_path / "two", small),
    ]
    wide = widen(small, tmp_path / "wide", *folders, num_layers=8)
    names = {path.name for path in wide.iterdir()}
    assert names == {"target", "one", "two", "widened.json"}


@pytest.mark.parametrize(
    "network,sizes,message",
    [
        ("dflash", {"hidden_size": 156}, "Possible are multiples of 64"),
        ("own-width", {"hidden_size": 156}, "Possible are multiples of 64"),
    ],
)
def test_a_drafter_that_cannot_grow_so_is_refused(
    small: Path, tmp_path: Path, network: str, sizes: dict[str, int], message: str
) -> None:
    """Its norms share an epsilon that may not change; which widths are possible is said."""
    if network == "dflash":
        folder = write_dflash(tmp_path / "drafter", small)
    else:
        folder = write_eagle3(tmp_path / "drafter", small, **EAGLE3[network])
    config = read_config(resolve(str(small)))
    plan = widening(config, Shape(**{**SIZES, "num_layers": 8, **sizes}))
    with pytest.raises(ConfigError, match=message):
        drafter_part(folder, plan, torch.float64)


def test_a_drafter_of_another_target_is_refused(small: Path, tmp_path: Path) -> None:
    """It would be widened to one that fits nothing."""
    other = tiny.write_tiny(tmp_path / "other", hidden_size=32, head_dim=16, num_hidden_layers=7)
    plan = widening(read_config(resolve(str(small))), Shape(**{**SIZES, "num_layers": 8}))
    for folder in (
        write_dflash(tmp_path / "one", other),
        write_eagle3(tmp_path / "two", other),
    ):
        with pytest.raises(ConfigError, match="does not belong to this target"):
            drafter_part(folder, plan, torch.float64)


def test_a_drafter_with_other_tensors_is_refused(small: Path, tmp_path: Path) -> None:
    """All that is wrong is named before anything is written."""
    from safetensors.torch import load_file, save_file

    folder = write_dflash(tmp_path / "drafter", small)
    tensors = load_file(folder / "model.safetensors")
    tensors["extra.weight"] = tensors.pop("norm.weight")
    save_file(tensors, folder / "model.safetensors")
    plan = widening(read_config(resolve(str(small))), Shape(**{**SIZES, "num_layers": 8}))
    with pytest.raises(ModelError, match=r"norm.weight is missing\n.*extra.weight is unexpected"):
        drafter_part(folder, plan, torch.float64)


def test_a_drafter_may_not_take_the_targets_place(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder's name is that of the widened one."""
    folder = write_dflash(tmp_path / "target", small)
    words = ["widen", str(tmp_path / "out"), "--model", str(small), "--drafter", str(folder)]
    assert main(words) == 2
    assert "may not be called 'target'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
