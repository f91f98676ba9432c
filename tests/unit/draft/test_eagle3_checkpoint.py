"""EAGLE-3 folders: one drafter in three layouts, maps that cannot be true, everything wrong at once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.config import DraftConfig
from paceline.core.errors import ConfigError, ModelError
from paceline.draft import build_network
from paceline.draft.base import TargetInfo
from paceline.draft.eagle3_checkpoint import load, load_plain, save
from tests import tiny, tiny_eagle3
from tests.dense import target_of


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TargetInfo]:
    """A tiny target: its folder, and what it lends."""
    folder = tiny.write_tiny(tmp_path_factory.mktemp("target"), "llama", seed=4)
    return folder, target_of(folder)[1]


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TargetInfo]:
    """A target with enough layers for the usual taps."""
    folder = tiny.write_tiny(tmp_path_factory.mktemp("deep"), "llama", seed=4, num_hidden_layers=8)
    return folder, target_of(folder)[1]


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def edit(folder: Path, change: dict[str, Any]) -> None:
    """Change a folder's config.json."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**values, **change}), encoding="utf-8")


def test_layouts_are_one_drafter(tmp_path: Path, deep: tuple[Path, TargetInfo]) -> None:
    """SafeAILab's, SpecForge's and speculators' files of one drafter load as the same network: the
    same taps, though one names none, one counts outputs and one inputs.
    """
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}
    nets = [
        load(tiny_eagle3.write_eagle3(tmp_path / name, deep[0], layout=name, **taps), deep[1])
        for name in ("safeai", "specforge", "speculators")
    ]
    assert {net.config.aux_layers for net in nets} == {(1, 3, 4)}
    assert nets[0].config == nets[1].config == nets[2].config
    assert same(nets[0], nets[1])
    assert same(nets[0], nets[2])


@pytest.mark.parametrize("flag", tiny_eagle3.FLAGS)
@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_flags_mean_the_same_in_each_layout(
    tmp_path: Path, target: tuple[Path, TargetInfo], layout: Any, flag: str
) -> None:
    """A norm flag is found wherever the layout has it; another flag's tensors do not fit."""
    folder = tiny_eagle3.write_eagle3(tmp_path, target[0], layout=layout, **{flag: True})
    config = load(folder, target[1]).config
    assert [f for f in tiny_eagle3.FLAGS if getattr(config, f)] == [flag]


@pytest.mark.parametrize(
    "options",
    [
        {"fc_norm": True, "norm_output": True},
        {"norm_before_fc": True, "norm_before_residual": True, "logit_scale": 0.5},
        {"qkv_bias": True, "hidden_size": 48, "target_hidden_size": 64},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    ],
)
@pytest.mark.parametrize("shard_bytes", [None, 20_000])
def test_what_is_written_is_read_again(
    tmp_path: Path,
    target: tuple[Path, TargetInfo],
    options: dict[str, Any],
    shard_bytes: int | None,
) -> None:
    """A saved drafter is the same drafter, maps included, in SafeAILab's names and types."""
    folder = tiny_eagle3.write_eagle3(tmp_path / "a", target[0], **options)
    net = load_plain(folder, target[1], dtype=torch.float32)
    save(net, tmp_path / "b", dtype=torch.float32, shard_bytes=shard_bytes)
    again = load_plain(tmp_path / "b", target[1], dtype=torch.float32)
    assert again.config == net.config
    assert same(again, net)
    files = list((tmp_path / "b").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes is not None)
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    original = load_file(folder / "model.safetensors")
    assert tensors.keys() == original.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == original[name].dtype, name
        assert torch.equal(tensor, original[name]), name
    said = json.loads((tmp_path / "b" / "config.json").read_text(encoding="utf-8"))
    assert said["architectures"] == ["LlamaForCausalLMEagle3"]
    assert said["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == tiny_eagle3.TAPS


def test_what_the_layout_cannot_say_is_not_written(
    tmp_path: Path, target: tuple[Path, TargetInfo]
) -> None:
    """Normed queries and keys (speculators' Qwen3 form) load, and saving them is refused."""
    folder = tiny_eagle3.write_eagle3(tmp_path / "a", target[0], layout="speculators")
    tensors = load_file(folder / "model.safetensors")
    for part in "qk":
        tensors[f"layers.0.self_attn.{part}_norm.weight"] = torch.ones(16)
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    edit(
        folder,
        {"transformer_layer_config": {**values["transformer_layer_config"], "model_type": "qwen3"}},
    )
    net = load_plain(folder, target[1], dtype=torch.float32)
    assert net.attention.q_norm is not None
    with pytest.raises(ModelError, match="queries and keys that are normed"):
        save(net, tmp_path / "b")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_tensors_that_are_no_weights_are_named(
    tmp_path: Path, target: tuple[Path, TargetInfo], value: float
) -> None:
    """One NaN, or numbers that stand for something else, would draft nonsense in silence."""
    folder = tiny_eagle3.write_eagle3(tmp_path / "d", target[0])
    tensors = load_file(folder / "model.safetensors")
    tensors["midlayer.hidden_norm.weight"] = tensors["midlayer.hidden_norm.weight"].to(torch.int8)
    tensors["midlayer.mlp.up_proj.weight"][-1, -1] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load(folder, target[1])
    for said in (
        "midlayer.hidden_norm.weight: of dtype int8",
        "midlayer.mlp.up_proj.weight: with NaN or infinite values",
        "must be finite numbers of dtype bfloat16",
    ):
        assert said in str(caught.value)
    assert "fc.weight" not in str(caught.value)


def test_every_wrong_tensor_is_listed(tmp_path: Path, target: tuple[Path, TargetInfo]) -> None:
    """Missing, extra and misshapen tensors, and wrong maps, are all named in one message."""
    folder = tiny_eagle3.write_eagle3(tmp_path, target[0])
    tensors = load_file(folder / "model.safetensors")
    del tensors["midlayer.hidden_norm.weight"]
    tensors["fc_norm.0.weight"] = torch.zeros(64)  # a flag that the configuration lacks
    tensors["midlayer.self_attn.k_proj.weight"] = torch.zeros(32, 64)  # not doubled
    tensors["d2t"] = tensors["d2t"][:-1].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load(folder, target[1])
    for said in (
        "missing: midlayer.hidden_norm.weight",
        "unexpected: fc_norm.0.weight",
        "wrong shape [32, 64] instead of [32, 128]: midlayer.self_attn.k_proj.weight",
        "wrong shape [59] instead of [60]: d2t",
    ):
        assert said in str(caught.value)


def broken_maps() -> dict[str, tuple[Any, str]]:
    """Changes of (d2t, t2d) in place, and what is said of them."""

    def ids(d2t: Tensor) -> Tensor:
        return d2t + torch.arange(len(d2t))

    def swapped(d2t: Tensor, t2d: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.arange(len(d2t))
        order[[3, 4]] = order[[4, 3]]
        return ids(d2t)[order] - torch.arange(len(d2t)), t2d

    def other(d2t: Tensor, t2d: Tensor) -> tuple[Tensor, Tensor]:
        """Nearly the same count of words: one id fewer, one more."""
        changed = t2d.clone()
        changed[ids(d2t)[10]] = False
        changed[(~t2d).nonzero()[0]] = True
        return d2t, changed

    def one_more(d2t: Tensor, t2d: Tensor) -> tuple[Tensor, Tensor]:
        changed = t2d.clone()
        changed[(~t2d).nonzero()[0]] = True
        return d2t, changed

    return {
        "zero": (lambda d, t: (d * 0, t), "d2t is all zero"),
        "ids": (lambda d, t: (ids(d), t), "d2t holds token ids; it must hold their offsets"),
        "0 ... N - 1 as offsets": (
            lambda d, t: (torch.arange(len(d)), t),
            "d2t points outside the vocabulary of 97",
        ),
        "unsorted": (swapped, "does not increase"),
        "another's": (other, "t2d and d2t disagree about"),
        "one more": (one_more, "t2d marks 61 tokens, d2t names 60"),
        "no whole numbers": (lambda d, t: (d.float(), t), "it must hold whole numbers"),
    }


@pytest.mark.parametrize("fault", broken_maps())
def test_maps_that_cannot_be_true(
    tmp_path: Path, target: tuple[Path, TargetInfo], fault: str
) -> None:
    """What would draft wrong words without an error is refused, by name."""
    change, said = broken_maps()[fault]
    folder = tiny_eagle3.write_eagle3(tmp_path, target[0])
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"], tensors["t2d"] = change(tensors["d2t"], tensors["t2d"])
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=re.escape(said)):
        load(folder, target[1])


def test_maps_may_be_missing_where_they_follow(
    tmp_path: Path, target: tuple[Path, TargetInfo]
) -> None:
    """Without t2d it follows from d2t; without both the draft vocabulary is the target's, or the
    folder is refused.
    """
    small = tiny_eagle3.write_eagle3(tmp_path / "small", target[0])
    whole = tiny_eagle3.write_eagle3(
        tmp_path / "whole", target[0], draft_vocab_size=None, ids=torch.arange(97)
    )
    for folder, dropped in ((small, {"t2d"}), (whole, {"t2d", "d2t"})):
        tensors = load_file(folder / "model.safetensors")
        kept = {n: t for n, t in tensors.items() if n not in dropped}
        save_file(kept, folder / "model.safetensors")
        net = load(folder, target[1])
        assert torch.equal(net.t2d, tensors["t2d"])
    assert net.d2t.tolist() == list(range(97))
    tensors = load_file(small / "model.safetensors")
    del tensors["d2t"]
    save_file(tensors, small / "model.safetensors")
    with pytest.raises(ModelError, match="missing: d2t"):
        load(small, target[1])


@pytest.mark.parametrize(
    "options, said",
    [
        ({"target_hidden_size": 32}, "size of the target's features: 32 here, 64 in the target"),
        ({"vocab_size": 100}, "vocabulary: 100 here, 97 in the target"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
            r"tapped layers \[2\]; the target has 0 to 1",
        ),
        ({"eagle_config": None}, r"tapped layers \[-2\]; the target has 0 to 1"),
    ],
)
def test_another_target_s_drafter(
    tmp_path: Path, target: tuple[Path, TargetInfo], options: dict[str, Any], said: str
) -> None:
    """A drafter of another target is refused before its tensors are read, with the figures."""
    folder = tiny_eagle3.write_eagle3(tmp_path, target[0])
    edit(folder, options)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=said):
        load(folder, target[1])


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"model": None}, "no folder was given"),
        ({"model": "nowhere"}, "there is no drafter folder 'nowhere'"),
        ({"eagle_topk": 0}, "eagle_topk is 0; 1 or more"),
        ({"eagle_num_steps": -1}, "eagle_num_steps is -1; 1 or more"),
    ],
)
def test_settings_out_of_range(
    target: tuple[Path, TargetInfo], settings: dict[str, Any], said: str
) -> None:
    """What cannot be drafted with is refused, not rounded to something that can."""
    with pytest.raises(ConfigError, match=said):
        build_network(DraftConfig(method="eagle3", **settings), target[1])


@pytest.mark.parametrize("nodes", [0, 5])
def test_children_that_could_never_be_proposed_are_not_made(
    tmp_path: Path, target: tuple[Path, TargetInfo], nodes: int
) -> None:
    """However many are asked for, memory is taken for as many as there are nodes."""
    folder = tiny_eagle3.write_eagle3(tmp_path, target[0])
    config = DraftConfig(
        method="eagle3", model=str(folder), num_speculative_tokens=nodes, eagle_topk=100_000
    )
    spec = build_network(config, target[1]).spec
    assert (spec.max_nodes, spec.scratch) == (1 + nodes, max(0, nodes - 1) * nodes)


def test_a_copy_of_the_target_s_embedding_is_not_kept(
    tmp_path: Path, target: tuple[Path, TargetInfo]
) -> None:
    """Files may carry the frozen embedding of the target; a trained one is the drafter's own."""
    folder = tiny_eagle3.write_eagle3(tmp_path, target[0], layout="speculators")
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"] = torch.full((97, 64), 0.5)
    tensors["verifier_lm_head.weight"] = torch.zeros(3)  # a leftover of training
    save_file(tensors, folder / "model.safetensors")
    assert load(folder, target[1]).embedding is None
    edit(folder, {"embed_requires_grad": True})
    net = load(folder, target[1])
    assert torch.equal(net.embed(torch.tensor([5])), torch.full((1, 64), 0.5).double())
