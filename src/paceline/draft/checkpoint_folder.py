"""A drafter's folder: found, and written whole or not at all: config.json and safetensors, in shards.

Everything goes to a folder beside it first, which then takes its place: a full disk or a killed
process leaves the old folder, or none, but never a mixture.

What is read is checked on the way: weights are numbers, and finite.

Not here: what the configuration and the tensors are called (each drafter's own checkpoint module).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from paceline.core.errors import ConfigError, ModelError
from paceline.models import checkpoint
from paceline.models.weights import bind

if TYPE_CHECKING:
    from paceline.core.config import DraftConfig, RopeConfig
    from paceline.models.checkpoint import TensorSource
    from paceline.models.weights import Network
    from paceline.ops.packed import Groups

_WEIGHTS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Item: TypeAlias = tuple[str, Tensor, torch.dtype]  # name, values, dtype in the file


class CheckedTensors:
    """A `TensorSource` that remembers which of the tensors read can't be weights.

    In place of those it gives zeros, so that the others are looked at too; `refuse` then names all.

    Args:
        source: the checkpoint.
    """

    def __init__(self, source: TensorSource) -> None:
        self.where, self.shapes = source.where, source.shapes
        self._source = source
        self._bad: dict[str, str] = {}  # tensor -> what is wrong with it

    def read(self, name: str) -> Tensor | Groups:
        """See `TensorSource`."""
        found = self._source.read(name)
        assert isinstance(found, Tensor), "drafters' folders hold no quantised groups"
        if found.dtype not in _WEIGHTS:
            self._bad[name] = f"of dtype {str(found.dtype).removeprefix('torch.')}"
        elif found.numel() and not all(bool(x.isfinite()) for x in found.aminmax()):
            self._bad[name] = "with NaN or infinite values"
        return torch.zeros(found.shape) if name in self._bad else found

    def refuse(self) -> None:
        """Refuse the checkpoint if any tensor read so far can't be weights.

        Raises:
            ModelError: as above; all are named.
        """
        if not self._bad:
            return
        listed = "\n".join(f"  - {name}: {what}" for name, what in self._bad.items())
        msg = (
            f"the drafter in {self.where} can't be used:\n{listed}\nWeights must be finite numbers of "
            f"dtype {', '.join(str(d).removeprefix('torch.') for d in _WEIGHTS)}. Download it again, or "
            "convert it."
        )
        raise ModelError(msg)


def locate(config: DraftConfig) -> Path:
    """The folder that a configuration names.

    Raises:
        ConfigError: it names none, or one that is not there.
    """
    if config.model is None:
        msg = (
            f"drafter {config.method!r} is a network, and no folder was given for it; it needs one "
            "with config.json and safetensors. Pass it (spec_model, --spec-model), or choose "
            "'suffix', which needs none."
        )
        raise ConfigError(msg)
    folder = Path(config.model).expanduser()
    if not folder.is_dir():
        msg = (
            f"there is no drafter folder {config.model!r}; a folder with config.json and "
            "safetensors is needed. Check the path."
        )
        raise ConfigError(msg)
    return folder


def write(
    folder: Path,
    config: Mapping[str, object],
    net: Network,
    *,
    dtype: torch.dtype,
    shard_bytes: int | None = None,
    tables: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a drafter network under its checkpoint names.

    Args:
        folder: replaced if it is there; its parent must exist.
        config: the object of config.json.
        net: with plain weights.
        dtype: of the network's tensors in the file.
        shard_bytes: most bytes of tensors in one file; a larger tensor gets a file of its own.
        tables: tensors that are no parameters, by checkpoint name; written as they are.

    Raises:
        ModelError: the weights are packed, so the exact values are gone.
        OSError: the parent is missing, read-only or full; `folder` is as it was.
    """
    tensors = [(name, tensor, dtype) for name, tensor in _tensors(net, folder)]
    tensors += [(name, tensor, tensor.dtype) for name, tensor in (tables or {}).items()]
    tensors.sort(key=lambda item: -item[2].itemsize)  # so that data is aligned
    shards = _shards(tensors, shard_bytes)
    count = len(shards)
    names = ["model.safetensors"]
    if count > 1:
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    fresh.mkdir()
    try:
        for name, shard in zip(names, shards, strict=True):
            _write_shard(fresh / name, shard)
        if count > 1:
            homes = {t: n for n, shard in zip(names, shards, strict=True) for t, _, _ in shard}
            size = sum(_nbytes(item) for shard in shards for item in shard)
            index = {"metadata": {"total_size": size}, "weight_map": homes}
            _write_json(fresh / checkpoint.INDEX, index)
        _write_json(fresh / "config.json", config)
        _swap(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def rope_values(rope: RopeConfig) -> dict[str, object]:
    """A rotary embedding in config.json's keys, for older and newer readers."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, object] = {"rope_type": rope.kind, "factor": rope.factor}
    names = {
        "linear": (),
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": (
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    }[rope.kind]
    scaling |= {name: getattr(rope, name) for name in names if getattr(rope, name) is not None}
    if rope.original_max_position is not None:
        scaling["original_max_position_embeddings"] = rope.original_max_position
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _tensors(net: Network, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its checkpoint name."""
    for binding in bind(net):
        value = binding.value
        if not isinstance(value, Tensor):
            msg = (
                f"cannot write {folder}: the drafter's weights are packed for this CPU; plain "
                "weights can be written. Save before the network is packed for serving."
            )
            raise ModelError(msg)
        parts = binding.join.split(value.detach(), [shape[0] for shape in binding.shapes])
        yield from zip(binding.sources, parts, strict=True)


def _nbytes(item: Item) -> int:
    _, tensor, dtype = item
    return tensor.numel() * dtype.itemsize


def _shards(items: list[Item], most: int | None) -> list[list[Item]]:
    """Tensors in table order, cut where the next one would make a file too large."""
    shards: list[list[Item]] = [[]]
    size = 0
    for item in items:
        nbytes = _nbytes(item)
        if most is not None and shards[-1] and size + nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += nbytes
    return shards


def _write_shard(path: Path, shard: list[Item]) -> None:
    specs = [checkpoint.TensorSpec(name=n, dtype=d, shape=tuple(t.shape)) for n, t, d in shard]
    checkpoint.write(path, specs, (t.to(d) for _, t, d in shard), {"format": "pt"})


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _swap(fresh: Path, folder: Path) -> None:
    """Put the new folder in the old one's place. Two renames: there is no single one for folders."""
    old = fresh.with_suffix(".old")
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
