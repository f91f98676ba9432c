from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import models
from paceline.core.errors import ModelError
from paceline.models import checkpoint
from paceline.models.checkpoint import INDEX, Checkpoint, TensorSpec
from tests import tiny


def load(folder: Path) -> models.LoadedModel:
    files = models.resolve(str(folder))
    return models.load(files, device=torch.device("cpu"), dtype=torch.float32, weights="auto")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    """A sharded checkpoint gives the same weights as the same one in a single file."""
    whole = load(tiny.write_tiny(tmp_path / "whole"))
    split = load(tiny.write_tiny(tmp_path / "split", shards=3))
    assert len(shards(tmp_path / "split")) == 3
    pairs = zip(whole.net.parameters(), split.net.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """All files that a download left out are listed."""
    tiny.write_tiny(tmp_path, shards=3)
    gone = shards(tmp_path)[1:]
    for file in gone:
        file.unlink()
    message = f"lacks 2 of the 3 shards.*{gone[0].name}, {gone[1].name}.*Download these files again"
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 200, -1])
@pytest.mark.parametrize("count", [1, 2])
def test_a_truncated_shard_is_named(tmp_path: Path, count: int, size: int) -> None:
    """A file that was cut anywhere, by even one byte, is refused before anything is loaded."""
    tiny.write_tiny(tmp_path, shards=count)
    file = shards(tmp_path)[-1]
    content = file.read_bytes()
    file.write_bytes(content[:size])
    message = (
        f"{re.escape(file.name)} is missing, damaged or truncated.*{len(content[:size]):,} bytes"
    )
    with pytest.raises(ModelError, match=f"{message}.*Download it again"):
        load(tmp_path)


def test_an_index_without_its_shards_tensors_is_a_missing_tensor(tmp_path: Path) -> None:
    """A tensor that the index promises and no shard holds is reported like any missing one."""
    tiny.write_tiny(tmp_path, shards=2)
    file = shards(tmp_path)[0]
    tensors = load_file(file)
    name, _ = tensors.popitem()
    save_file(tensors, file)
    with pytest.raises(ModelError, match=f"missing: {re.escape(name)}"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}'])
def test_a_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    """The index is read with the same suspicion as everything else."""
    tiny.write_tiny(tmp_path, shards=2)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ModelError, match=f"{INDEX} is unreadable.*Download it again"):
        load(tmp_path)


def test_the_index_decides_between_two_shards(tmp_path: Path) -> None:
    """Where two shards hold a tensor of one name, the index says which one counts."""
    tiny.write_tiny(tmp_path, shards=2)
    name = "model.norm.weight"
    homes = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    other = next(file for file in shards(tmp_path) if file.name != homes[name])
    save_file({**load_file(other), name: torch.zeros(64)}, other)
    assert bool(load(tmp_path).net.norm.weight.any())


def test_shards_without_index_are_refused(tmp_path: Path) -> None:
    """Guessing which files belong together loads half a model one day."""
    tiny.write_tiny(tmp_path, shards=2)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ModelError, match=f"00001-of-00002.*but no {INDEX}.*Download it too"):
        load(tmp_path)


def test_a_single_file_may_have_any_name(tmp_path: Path) -> None:
    """One safetensors file is the checkpoint, whatever it is called."""
    tiny.write_tiny(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    load(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", None])
def test_no_safetensors_is_said(tmp_path: Path, name: str | None) -> None:
    """Pickled weights are never opened, and the message says why."""
    tiny.write_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    if name:
        (tmp_path / name).write_bytes(b"")
    reason = "only pickled weights.*can run code" if name else "no weights"
    with pytest.raises(ModelError, match=f"holds {reason}.*needed is model.safetensors.*Download"):
        load(tmp_path)


def test_what_is_written_is_what_safetensors_reads(tmp_path: Path) -> None:
    """The streaming writer's files are the library's files, for every dtype and an empty shape."""
    tensors = {
        "d": torch.randn(3, 2, dtype=torch.float64),
        "f": torch.randn(5),
        "h": torch.randn(2, 2).half(),
        "b": torch.randn(7).bfloat16(),
        "i": torch.arange(3, dtype=torch.int8),
        "u": torch.arange(4, dtype=torch.uint8),
        "e": torch.zeros(0, 4, dtype=torch.uint8),
        "t": torch.randn(4, 3, dtype=torch.float64).T.contiguous().to(torch.int8).T,
    }
    specs = [TensorSpec(name=n, dtype=t.dtype, shape=tuple(t.shape)) for n, t in tensors.items()]
    checkpoint.write(tmp_path / "x.safetensors", specs, tensors.values(), {"a": "ü"})
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    opened = Checkpoint(tmp_path / "x.safetensors")
    assert opened.metadata == {"a": "ü"}
    assert opened.shapes["d"] == (3, 2)


def test_loaded_tensors_outlive_their_file(tmp_path: Path) -> None:
    """Weights do not change, or crash, when the file is overwritten under a running model."""
    folder = tiny.write_tiny(tmp_path)
    net = load(folder).net
    before = net.norm.weight.clone()
    file = folder / "model.safetensors"
    with file.open("r+b") as out:
        out.write(b"\0" * file.stat().st_size)
    assert torch.equal(net.norm.weight, before)
