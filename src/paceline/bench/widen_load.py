"""Widened networks without their files: tensors are made on the device and go straight into the network.

For measuring on machines whose disk is small or slow. What is made is what `widen_files.py` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline import models
from paceline.bench.widen_files import Part, made, write_json
from paceline.models import LoadedModel


class WidenedTensors:
    """A `TensorSource` of a part's tensors, made when they are asked for.

    Args:
        part: from `plan_widening`.
        where: its configuration's folder, for messages.
        device: where tensors are made.
        seed: of random numbers.
    """

    def __init__(self, part: Part, where: Path, device: torch.device, seed: int) -> None:
        self.where = where
        self.shapes: Mapping[str, tuple[int, ...]] = {
            piece.name: piece.spec.shape for piece in part.pieces
        }
        self._part, self._device, self._seed = part, device, seed
        self._pieces = {piece.name: piece for piece in part.pieces}

    def read(self, name: str) -> Tensor:
        """One tensor; the same at every call."""
        return made(self._part, self._pieces[name], self._seed, self._device)


def load_target(part: Part, folder: Path, device: torch.device, seed: int) -> LoadedModel:
    """The widened target, in the type that it was planned in.

    Args:
        part: the target's.
        folder: gets its configuration and its tokenizer; made if it is not there.
        device: where it lives.
        seed: of random numbers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", part.config)
    part.finish(folder)
    (dtype,) = {piece.dtype for piece in part.pieces}
    return models.load_from(
        models.resolve(str(folder)),
        lambda _: WidenedTensors(part, folder, device, seed),
        device=device,
        dtype=dtype,
        weights="bf16",
        notes=("weights: widened in memory",),
    )
