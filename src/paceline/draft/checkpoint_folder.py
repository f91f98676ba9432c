"""A drafter's folder, written whole or not at all: config.json and safetensors, in shards if large.

Everything goes to a folder beside it first, which then takes its place: a full disk or a killed
process leaves the old folder, or none, but never a mixture.

Not here: what the configuration and the tensors are called (each drafter's own checkpoint module).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.models import checkpoint
from paceline.models.weights import bind

if TYPE_CHECKING:
    from paceline.models.weights import Network


def write(
    folder: Path,
    config: Mapping[str, object],
    net: Network,
    *,
    dtype: torch.dtype,
    shard_bytes: int | None = None,
) -> None:
    """Write a drafter network under its checkpoint names.

    Args:
        folder: replaced if it is there; its parent must exist.
        config: the object of config.json.
        net: with plain weights.
        dtype: of the tensors in the file.
        shard_bytes: most bytes of tensors in one file; a larger tensor gets a file of its own.

    Raises:
        ModelError: the weights are packed, so the exact values are gone.
        OSError: the parent is missing, read-only or full; `folder` is as it was.
    """
    shards = _shards(list(_tensors(net, folder)), dtype, shard_bytes)
    count = len(shards)
    names = ["model.safetensors"]
    if count > 1:
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    fresh.mkdir()
    try:
        for name, shard in zip(names, shards, strict=True):
            _write_shard(fresh / name, shard, dtype)
        if count > 1:
            homes = {t: n for n, shard in zip(names, shards, strict=True) for t, _ in shard}
            size = sum(x.numel() * dtype.itemsize for shard in shards for _, x in shard)
            index = {"metadata": {"total_size": size}, "weight_map": homes}
            _write_json(fresh / checkpoint.INDEX, index)
        _write_json(fresh / "config.json", config)
        _swap(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


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


def _shards(
    tensors: list[tuple[str, Tensor]], dtype: torch.dtype, most: int | None
) -> list[list[tuple[str, Tensor]]]:
    """Tensors in table order, cut where the next one would make a file too large."""
    shards: list[list[tuple[str, Tensor]]] = [[]]
    size = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * dtype.itemsize
        if most is not None and shards[-1] and size + nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append((name, tensor))
        size += nbytes
    return shards


def _write_shard(path: Path, shard: list[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    specs = [checkpoint.TensorSpec(name=n, dtype=dtype, shape=tuple(t.shape)) for n, t in shard]
    checkpoint.write(path, specs, (t.to(dtype) for _, t in shard), {"format": "pt"})


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _swap(fresh: Path, folder: Path) -> None:
    """Put the new folder in the old one's place. Two renames: there is no single one for folders."""
    old = fresh.with_suffix(".old")
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
