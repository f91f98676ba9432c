"""Writing widened networks: one tensor at a time, in shards, into a folder that appears whole or not at all.

A killed writer leaves a hidden folder beside the one asked for; the next call for the same folder removes
it and starts anew.

Not here: what the tensors are (`widen.py`, `widen_drafters.py`).
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.bench.widen_axes import Recipe
from paceline.core.errors import ConfigError, ModelError
from paceline.models import checkpoint
from paceline.models.checkpoint import TensorSpec
from paceline.ops.packed import Groups

log = logging.getLogger(__name__)

FACTS = "widened.json"
CPU = torch.device("cpu")
_SHOWN = 8  # tensors named in a message
_ROOM = 256 << 20  # bytes for tokenizers, headers and whatever else writes to the disk
Progress: TypeAlias = Callable[[int, int], None]  # megabytes done, in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A tensor to be written."""

    name: str
    origin: str  # the tensor that it is made of
    old: tuple[int, ...]  # that tensor's shape
    recipe: Recipe
    dtype: torch.dtype

    @property
    def spec(self) -> TensorSpec:
        """For the file's header."""
        return TensorSpec(name=self.name, dtype=self.dtype, shape=self.recipe.shape(self.old))

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return self.spec.nbytes // self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A network's folder: a configuration, tensors, and what else belongs there."""

    name: str  # of the folder
    config: Mapping[str, object]  # of config.json
    pieces: Sequence[Piece]
    source: checkpoint.TensorSource
    finish: Callable[[Path], None]  # adds the tokenizer and the like

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(piece.spec.nbytes for piece in self.pieces)


def check_shapes(
    source: checkpoint.TensorSource,
    wanted: Mapping[str, tuple[int, ...]],
    *,
    ignored: Sequence[str] = (),
) -> None:
    """Refuse a checkpoint that is not what its configuration says.

    Args:
        source: the checkpoint.
        wanted: the shape of every tensor that the configuration asks for.
        ignored: patterns of tensors that carry nothing.

    Raises:
        ModelError: tensors are missing, misshapen or unexpected; the first are named.
    """
    wrong = [
        f"{name} is {'missing' if found is None else f'{list(found)} instead of {list(shape)}'}"
        for name, shape in wanted.items()
        if (found := source.shapes.get(name)) != shape
    ]
    wrong += [
        f"{name} is unexpected"
        for name in source.shapes
        if name not in wanted and not any(re.search(pattern, name) for pattern in ignored)
    ]
    if wrong:
        listed = "\n".join(f"  - {line}" for line in wrong[:_SHOWN])
        msg = (
            f"the tensors in {source.where} do not fit its configuration, in {len(wrong)} places:\n"
            f"{listed}\nAll must. Check that weights and configuration are complete and of the same "
            "model."
        )
        raise ModelError(msg)


def write(
    out: Path,
    parts: Sequence[Part],
    facts: Mapping[str, object],
    *,
    seed: int,
    shard_bytes: int,
    progress: Progress,
    device: torch.device = CPU,
) -> None:
    """Write all parts, as folders of their names, and the facts.

    Args:
        out: empty, or not there yet.
        parts: at most one tensor at a time is held of them.
        facts: for `FACTS`.
        seed: of random numbers.
        shard_bytes: most bytes of tensors in one file; a larger tensor gets a file of its own.
        progress: told after every tensor.
        device: where tensors are made.

    Raises:
        ConfigError: `out` holds something, another process writes it, or the disk is too small.
        ModelError: a source is damaged.
        OSError: the system refuses; `out` is as it was.
    """
    total = sum(part.nbytes for part in parts)
    done = 0

    def tensors(part: Part, shard: Sequence[Piece]) -> Iterator[Tensor]:
        nonlocal done
        for piece in shard:
            yield made(part, piece, seed, device).cpu()
            done += piece.spec.nbytes
            progress(done // 1_000_000, total // 1_000_000)

    with _appearing(out) as fresh:
        _check_space(fresh, total)
        for part in parts:
            folder = fresh / part.name
            folder.mkdir()
            shards = _shards(part.pieces, shard_bytes)
            names = _names(len(shards))
            for name, shard in zip(names, shards, strict=True):
                specs = [piece.spec for piece in shard]
                checkpoint.write(folder / name, specs, tensors(part, shard), {"format": "pt"})
            if len(shards) > 1:
                homes = {p.name: n for n, s in zip(names, shards, strict=True) for p in s}
                index = {"metadata": {"total_size": part.nbytes}, "weight_map": homes}
                write_json(folder / checkpoint.INDEX, index)
            write_json(folder / "config.json", part.config)
            part.finish(folder)
        write_json(fresh / FACTS, facts)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write an object, readably."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def made(part: Part, piece: Piece, seed: int, device: torch.device = CPU) -> Tensor:
    """A new tensor, made on the device."""
    found = part.source.read(piece.origin)
    old = found.dequantize(piece.dtype) if isinstance(found, Groups) else found
    old = old.to(device)
    return piece.recipe.make(old, piece.dtype, f"{seed}/{part.name}/{piece.name}")


def _shards(pieces: Sequence[Piece], most: int) -> list[list[Piece]]:
    """Wider numbers first, so that data is aligned; cut where the next would make a file too large."""
    shards: list[list[Piece]] = [[]]
    size = 0
    for piece in sorted(pieces, key=lambda p: -p.dtype.itemsize):
        if shards[-1] and size + piece.spec.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += piece.spec.nbytes
    return shards


def _names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _check_space(folder: Path, total: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < total + _ROOM:
        msg = (
            f"the widened networks take {total / 1e9:.2f} GB, and with {_ROOM / 1e9:.2f} GB of room "
            f"beside them that is more than the {free / 1e9:.2f} GB that are free on the disk of "
            f"{folder.parent}. Free some, name a folder on another disk, or choose smaller sizes."
        )
        raise ConfigError(msg)


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when the block ends, and is removed if it fails."""
    refuse_filled(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_name(f".{out.name}.widening")
    fresh.mkdir(exist_ok=True)
    lock = _locked(fresh, out)
    try:
        for left in fresh.iterdir():  # by a writer that was killed
            _remove(left)
        yield fresh
        fresh.replace(out)  # an empty folder gives way, a filled one does not
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def refuse_filled(out: Path) -> None:
    """Nothing is ever written over.

    Raises:
        ConfigError: `out` holds something, or is a file.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    what = "holds something already" if out.is_dir() else "is a file"
    msg = (
        f"{out} {what}; widened networks are written to a folder that is empty or not there yet. "
        "Name another, or remove it."
    )
    raise ConfigError(msg)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _locked(folder: Path, out: Path) -> int | None:
    """The descriptor that holds the folder's lock; None where folders can't be locked.

    The lock ends with the process, however that ends.
    """
    try:
        fcntl: Any = importlib.import_module("fcntl")
    except ImportError:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        msg = (
            f"another process is writing {out}; one at a time can. Wait until it has ended, or name "
            "another folder."
        )
        raise ConfigError(msg) from None
    except OSError as error:  # some network file systems
        os.close(descriptor)
        log.debug("%s can't be locked: %s", folder, error)
        return None
    return descriptor
