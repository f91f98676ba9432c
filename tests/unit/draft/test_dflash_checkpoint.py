"""DFlash folders: read, checked against the target, refused with everything that is wrong, written."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.config import DraftConfig
from paceline.core.errors import ConfigError, ModelError
from paceline.draft import build_network, checkpoint_folder
from paceline.draft.base import TargetInfo
from paceline.draft.dflash_checkpoint import load, load_plain, save
from tests import tiny, tiny_drafters

SHARDS = "model-*-of-*.safetensors"


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TargetInfo]:
    """A tiny target: its folder, and what it lends."""
    folder = tiny.write_tiny(tmp_path_factory.mktemp("target"), "llama", seed=4)
    return folder, tiny_drafters.target_of(folder)[1]


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_shards_are_one_checkpoint(tmp_path: Path, target: tuple[Path, TargetInfo]) -> None:
    """A sharded folder with its index loads as the single file does."""
    one = tiny_drafters.write_dflash(tmp_path / "one", target[0])
    three = tiny_drafters.write_dflash(tmp_path / "three", target[0], shards=3)
    assert len(list(three.glob(SHARDS))) == 3
    assert same(load(one, target[1]), load(three, target[1]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_tensors_that_are_no_weights_are_named(
    tmp_path: Path, target: tuple[Path, TargetInfo], value: float
) -> None:
    """One NaN, or numbers that stand for something else, would draft nonsense in silence."""
    folder = tiny_drafters.write_dflash(tmp_path / "d", target[0])
    tensors = load_file(folder / "model.safetensors")
    tensors["hidden_norm.weight"] = tensors["hidden_norm.weight"].to(torch.int8)
    tensors["layers.1.mlp.up_proj.weight"][-1, -1] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load(folder, target[1])
    for said in (
        "hidden_norm.weight: of dtype int8",
        "layers.1.mlp.up_proj.weight: with NaN or infinite values",
        "must be finite numbers of dtype bfloat16",
    ):
        assert said in str(caught.value)
    assert "fc.weight" not in str(caught.value)


def test_every_wrong_tensor_is_listed(tmp_path: Path, target: tuple[Path, TargetInfo]) -> None:
    """Missing, extra and misshapen tensors are all named in one message."""
    folder = tiny_drafters.write_dflash(tmp_path / "d", target[0])
    tensors = load_file(folder / "model.safetensors")
    del tensors["hidden_norm.weight"], tensors["layers.1.mlp.up_proj.weight"]
    tensors["layers.0.self_attn.gate.weight"] = torch.zeros(3)
    tensors["fc.weight"] = torch.zeros(64, 192)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load(folder, target[1])
    for said in (
        "missing: hidden_norm.weight",
        "missing: layers.1.mlp.up_proj.weight",
        "unexpected: layers.0.self_attn.gate.weight",
        "wrong shape [64, 192] instead of [64, 128]: fc.weight",
    ):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"hidden_size": 48}, "hidden size: 48 here, 64 in the target"),
        ({"vocab_size": 100}, "vocabulary: 100 here, 97 in the target"),
        ({"num_target_layers": 9}, "number of target layers: 9 here, 2 in the target"),
        ({"target_hidden_size": 32}, "size of the target's features: 32 here"),
        ({"dflash_config": {"mask_token_id": 97}}, "mask token 97 is beyond"),
        (
            {"dflash_config": {"target_layer_ids": [1, 2]}},
            r"tapped layers \[2\]; the target has 0 to 1",
        ),
    ],
)
def test_another_target_s_drafter(
    tmp_path: Path, target: tuple[Path, TargetInfo], options: dict[str, Any], said: str
) -> None:
    """A drafter of another target is refused before its tensors are read, with the figures."""
    folder = tiny_drafters.write_dflash(tmp_path / "d", target[0], **options)
    with pytest.raises(ConfigError, match=f"does not belong to this target(.|\n)*{said}"):
        load(folder, target[1])


def test_layouts_that_only_tensors_show(tmp_path: Path, target: tuple[Path, TargetInfo]) -> None:
    """A head or a mask embedding of its own is another layout, not an extra tensor."""
    folder = tiny_drafters.write_dflash(tmp_path / "d", target[0])
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.zeros(97, 64)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="own head or embedding"):
        load(folder, target[1])
    save_file(tensors, folder / "model.safetensors")
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ModelError, match="mask embedding of its own"):
        load(folder, target[1])


def test_a_zero_mask_row_is_said(
    tmp_path: Path, target: tuple[Path, TargetInfo], caplog: pytest.LogCaptureFixture
) -> None:
    """A mask token whose embedding is zero warns loudly; an ordinary one does not."""
    folder = tiny_drafters.write_dflash(tmp_path / "d", target[0])
    base = tmp_path / "target"
    tiny.write_tiny(base, "llama", seed=4)
    tensors = load_file(base / "model.safetensors")
    tensors["model.embed_tokens.weight"][tiny_drafters.MASK] = 0.0
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        load(folder, target[1])
        assert not caplog.records
        load(folder, tiny_drafters.target_of(base)[1])
    assert "embedding of the mask token 96 is zero" in caplog.text


@pytest.mark.parametrize("model, said", [(None, "no folder was given"), ("nowhere", "no drafter")])
@pytest.mark.parametrize("method", ["dflash", "ddtree"])
def test_no_folder(
    target: tuple[Path, TargetInfo], method: str, model: str | None, said: str
) -> None:
    """A missing name and a missing folder each say what to do."""
    with pytest.raises(ConfigError, match=said):
        build_network(DraftConfig(method=method, model=model), target[1])


@pytest.mark.parametrize("shard_bytes", [None, 60_000])
@pytest.mark.parametrize(
    "layout", [{"attention_bias": True}, tiny_drafters.DFLASH2], ids=["first", "second"]
)
def test_saved_and_loaded(
    tmp_path: Path,
    target: tuple[Path, TargetInfo],
    layout: dict[str, Any],
    shard_bytes: int | None,
) -> None:
    """What is written reads back bit for bit, whole or in shards of the size that was asked for."""
    folder = tiny_drafters.write_dflash(tmp_path / "d", target[0], **layout)
    net = load_plain(folder, target[1], dtype=torch.float32)
    save(net, tmp_path / "copy", dtype=torch.float32, shard_bytes=shard_bytes)
    assert same(load_plain(tmp_path / "copy", target[1], dtype=torch.float32), net)
    files = list((tmp_path / "copy").glob("*.safetensors"))
    names = {name for file in files for name in load_file(file)}
    assert names == set(load_file(folder / "model.safetensors")), "names are the format's"
    if shard_bytes is not None:
        assert len(files) > 2
        assert all(sum(t.nbytes for t in load_file(f).values()) <= shard_bytes for f in files)
        assert (tmp_path / "copy" / "model.safetensors.index.json").is_file()


def test_saved_in_bfloat16(tmp_path: Path, target: tuple[Path, TargetInfo]) -> None:
    """By default tensors are written in 16 bits, whatever the network's own dtype."""
    net = load_plain(
        tiny_drafters.write_dflash(tmp_path / "d", target[0]), target[1], dtype=torch.float32
    )
    save(net, tmp_path / "copy")
    tensors = load_file(tmp_path / "copy" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["fc.weight"], net.fc.weight.to(torch.bfloat16))


def test_a_failed_write_leaves_the_old_folder(
    tmp_path: Path, target: tuple[Path, TargetInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up in the second shard: the old checkpoint is there, and nothing else."""
    folder = tiny_drafters.write_dflash(tmp_path / "d", target[0])
    net = load_plain(folder, target[1], dtype=torch.float32)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    write, calls = checkpoint_folder.checkpoint.write, []

    def full(path: Path, *args: object) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        write(path, *args)

    monkeypatch.setattr(checkpoint_folder.checkpoint, "write", full)
    with pytest.raises(OSError, match="No space left"):
        save(net, folder, dtype=torch.float32, shard_bytes=60_000)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    monkeypatch.undo()
    save(net, folder, dtype=torch.float32)
    assert same(load_plain(folder, target[1], dtype=torch.float32), net)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_packed_weights_are_not_written(tmp_path: Path, target: tuple[Path, TargetInfo]) -> None:
    """A network packed for serving cannot be saved: its exact values are gone."""
    folder = tiny_drafters.write_dflash(tmp_path / "d", target[0])
    net = load_plain(folder, target[1], dtype=torch.float32)
    net.fc.set_weight(_Packed((64, 128)))
    with pytest.raises(ModelError, match="packed"):
        save(net, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


class _Packed:
    """As little of a packed weight as can be set."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape


def test_a_truncated_file_is_named(tmp_path: Path, target: tuple[Path, TargetInfo]) -> None:
    """A damaged download says which file."""
    folder = tiny_drafters.write_dflash(tmp_path / "d", target[0])
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is missing, damaged or truncated"):
        load(folder, target[1])
    (folder / "config.json").write_text(json.dumps([]), encoding="utf-8")
    with pytest.raises(ModelError, match="must be a JSON object"):
        load(folder, target[1])
