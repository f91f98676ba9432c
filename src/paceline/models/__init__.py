"""Models: a registry of networks, and `load`, which fills one from files.

`resolve` finds the files of a name, `read_config` says what they hold, `load` makes a network of them;
`load_random` makes one of the configuration alone.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.core.config import ModelConfig, WeightMode
from paceline.core.device import free_memory
from paceline.core.errors import ModelError
from paceline.core.registry import Registry
from paceline.models import gguf, hf
from paceline.models import weights as tables
from paceline.models.base import CausalLM
from paceline.models.checkpoint import Checkpoint, TensorSource
from paceline.models.gguf_header import read_gguf_header
from paceline.models.gguf_weights import open_gguf
from paceline.models.random_weights import RandomTensors
from paceline.models.source import ModelFiles, resolve

__all__ = [
    "MODELS",
    "CausalLM",
    "LoadedModel",
    "ModelFiles",
    "load",
    "load_from",
    "load_random",
    "read_config",
    "resolve",
]

logger = logging.getLogger(__name__)

MODELS: Registry[type[CausalLM]] = Registry(
    "model architecture",
    {
        "llama": "paceline.models.llama:Llama",
        "qwen2": "paceline.models.qwen3:Qwen2",
        "qwen3": "paceline.models.qwen3:Qwen3",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A network with its weights, and where it came from."""

    net: CausalLM
    config: ModelConfig
    files: ModelFiles
    notes: tuple[str, ...]  # lines for people: what was converted, packed or assumed


def read_config(files: ModelFiles) -> ModelConfig:
    """Read a model's shape and options, without its weights.

    Raises:
        ModelError: the configuration is missing, malformed or asks for what is not supported.
    """
    if files.kind == "gguf":
        return gguf.model_config(read_gguf_header(files.path), files.path)
    raw = hf.read_config(files.path)
    return MODELS.get(raw.architecture).from_hf(raw)


def load(
    files: ModelFiles, *, device: torch.device, dtype: torch.dtype, weights: WeightMode
) -> LoadedModel:
    """Build a network and fill it, one parameter at a time: the model is never held twice.

    Args:
        files: from `resolve`.
        device: where the network lives.
        dtype: of activations and plain weights.
        weights: how matrices are kept on a CPU ("auto": what multiplies fastest for this file, "bf16":
            unpacked); on other devices they are always plain.

    Raises:
        ModelError: files are missing, damaged, not supported or do not fit each other.
    """
    notes: list[str] = []
    source: TensorSource
    if files.kind == "gguf":
        header = read_gguf_header(files.path)
        config = gguf.model_config(header, files.path)
        source, note = open_gguf(files.path, gguf.entries(header, config), dtype)
        notes.append(note)
    else:
        config = read_config(files)
        source = Checkpoint(files.path)
    if config.tie_embeddings and not _really_tied(source):
        config = dataclasses.replace(config, tie_embeddings=False)
        notes.append(
            "the configuration ties the head to the embedding, but the tensors differ: untied"
        )
    _refuse_impossible(config, source)
    net = MODELS.get(config.architecture)(config, dtype=dtype, device="meta")
    tables.load(net, source, tables.Placement(device=device, dtype=dtype, weights=weights))
    net.rope.to(device)
    packed = tables.packed_kinds(net)
    notes.extend(f"{count} matrices: {kind}" for kind, count in packed.items())
    for note in notes:
        logger.info("%s: %s", files.name, note)
    return LoadedModel(net=net.eval(), config=config, files=files, notes=tuple(notes))


def load_random(
    files: ModelFiles,
    *,
    device: torch.device,
    dtype: torch.dtype,
    weights: WeightMode,
    seed: int,
) -> LoadedModel:
    """Build a network from its configuration alone and fill it with random weights, on the device.

    For measuring speed: what it says means nothing.

    Args:
        files: from `resolve`; only the configuration is read.
        device: where the network lives.
        dtype: of activations and plain weights.
        weights: how matrices are kept on a CPU, as for `load`.
        seed: of the weights.

    Raises:
        ModelError: the configuration is missing, malformed or asks for what is not supported.
    """
    notes = (f"weights: random, seed {seed}; what the model says means nothing",)

    def made(net: CausalLM) -> TensorSource:
        return RandomTensors(net, files.path, device=device, dtype=dtype, seed=seed)

    return load_from(files, made, device=device, dtype=dtype, weights=weights, notes=notes)


def load_from(
    files: ModelFiles,
    source: Callable[[CausalLM], TensorSource],
    *,
    device: torch.device,
    dtype: torch.dtype,
    weights: WeightMode,
    notes: tuple[str, ...],
) -> LoadedModel:
    """Build a network from its configuration and fill it with tensors that are in no file.

    Args:
        files: from `resolve`; only the configuration is read.
        source: the tensors of a network that has none yet, one at a time.
        device: where the network lives.
        dtype: of activations and plain weights.
        weights: how matrices are kept on a CPU, as for `load`.
        notes: where the tensors come from.

    Raises:
        ModelError: the configuration is missing, malformed or asks for what is not supported, or the
            tensors do not fit it.
    """
    config = read_config(files)
    net = MODELS.get(config.architecture)(config, dtype=dtype, device="meta")
    placement = tables.Placement(device=device, dtype=dtype, weights=weights)
    tables.load(net, source(net), placement)
    net.rope.to(device)
    return LoadedModel(net=net.eval(), config=config, files=files, notes=notes)


def _refuse_impossible(config: ModelConfig, source: TensorSource) -> None:
    """Stop at sizes that would take hours or all memory before the tensors are even compared.

    Raises:
        ModelError: more layers than tensors, or positions whose table does not fit the memory.
    """
    problems = []
    if config.num_layers > len(source.shapes):
        problems.append(f"{config.num_layers} layers, but only {len(source.shapes)} tensors")
    table, free = config.max_position * config.head_dim * 4, free_memory(torch.device("cpu"))
    if table > free:
        problems.append(
            f"a context of {config.max_position} tokens with heads of size {config.head_dim}, whose "
            f"rotary table needs {table / 1e9:.1f} GB ({free / 1e9:.1f} GB are free)"
        )
    if problems:
        msg = (
            f"the configuration of {source.where} states {'; and '.join(problems)}. It must be that "
            "of these weights, and fit the memory. Check the configuration."
        )
        raise ModelError(msg)


def _really_tied(source: TensorSource) -> bool:
    """Whether a tied checkpoint's own head, if it has one, is the embedding (as transformers asks)."""
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    if head not in source.shapes or table not in source.shapes:
        return True
    one, other = source.read(head), source.read(table)
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and torch.equal(one, other)
    )
