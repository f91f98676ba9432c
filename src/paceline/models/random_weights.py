"""RandomTensors: a checkpoint that nobody trained, made on the device from a seed.

A `TensorSource` like a checkpoint's, so a network is filled by the code that loads real weights, and
config.json is the only file. For measuring speed: what such a network says means nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from paceline.models.weights import Network, bind

_LOGIT_STD = 2.0  # of the head's output, about that of a trained model
_RESIDUAL = ("o_proj.weight", "down_proj.weight")  # what adds to the stream, twice a layer


class RandomTensors:
    """Every tensor that a network's table asks for, of sensible scale.

    Matrices keep the variance of what they are given; those that add to the residual stream add as
    much, in all layers together, as it holds. Norms are ones and biases zeros.

    Args:
        net: whose tensors; on any device, "meta" included.
        where: its configuration, for messages.
        device: where tensors are made.
        dtype: of the tensors.
        seed: the same seed makes the same tensors on the same kind of device.
    """

    def __init__(
        self, net: Network, where: Path, *, device: torch.device, dtype: torch.dtype, seed: int
    ) -> None:
        self.where = where
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: shape
            for binding in bind(net)
            for name, shape in zip(binding.sources, binding.shapes, strict=True)
        }
        self._num_layers = net.config.num_layers
        self._device, self._dtype, self._seed = device, dtype, seed

    def read(self, name: str) -> Tensor:
        """One tensor; the same at every call."""
        shape = self.shapes[name]
        made = torch.empty(shape, dtype=self._dtype, device=self._device)
        if len(shape) == 1:
            return made.fill_(0.0 if name.endswith("bias") else 1.0)
        std = float(shape[-1]) ** -0.5
        if name.endswith(_RESIDUAL):
            std *= (2 * self._num_layers) ** -0.5
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            std *= _LOGIT_STD
        # Keyed by name, so that what else the network has changes no tensor.
        generator = torch.Generator(self._device)
        generator.manual_seed(zlib.crc32(f"{self._seed}/{name}".encode()))
        return made.normal_(0.0, std, generator=generator)
