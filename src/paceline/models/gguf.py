"""GGUF header -> ModelConfig, and the checkpoint names of its tensors.

The architectures that are read are written by llama.cpp's converter from Hugging Face checkpoints.
This module knows what that converter renames, reorders and leaves out; the bytes are read in
`gguf_weights.py`, the header in `gguf_header.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from paceline.core.config import ModelConfig, RopeConfig
from paceline.core.errors import ModelError
from paceline.layers.rope import frequencies
from paceline.models.gguf_header import GGUFHeader, GGUFTensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_F32 = 0
# Rotary embedding in interleaved pairs: the converter reorders these projections' rows for it.
_PERMUTED = ("llama",)
_ROPE_FREQS = "rope_freqs.weight"
_LLAMA3_CONTEXT = 8192  # Llama 3's original context; the file holds only what follows from it

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor of the file, seen as one of a Hugging Face checkpoint."""

    tensor: GGUFTensor
    heads: int | None = None  # rows are in interleaved order within each of so many heads


class _Keys:
    """Typed access to the keys below the architecture's name; problems are collected."""

    def __init__(self, header: GGUFHeader, architecture: str) -> None:
        self._values = header.metadata
        self._prefix = architecture
        self.problems: list[str] = []

    def get(self, key: str) -> object:
        return self._values.get(f"{self._prefix}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        found = "a list" if isinstance(value, list) else repr(value)
        self.problems.append(f"{self._prefix}.{key} must be a positive whole number, it is {found}")
        return 1

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        self.problems.append(f"{self._prefix}.{key} must be a number, it is {value!r}")
        return 1.0


def model_config(header: GGUFHeader, path: Path) -> ModelConfig:
    """Read a model's shape and options.

    Args:
        header: of the file.
        path: the file; one small tensor may be read from it.

    Raises:
        ModelError: the architecture is not supported, or keys are missing, malformed or ask for what
            is not supported; all of them are listed.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        msg = (
            f"{path} holds the architecture {architecture!r}; supported in GGUF files are "
            f"{', '.join(ARCHITECTURES)}. Use a file of one of these."
        )
        raise ModelError(msg)
    keys = _Keys(header, str(architecture))
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(hidden // heads, 1))
    max_position = keys.integer("context_length")
    _refuse_unsupported(header, keys, head_dim, max_position)
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        keys.problems.append("token_embd.weight, the token table, is missing")
    config = ModelConfig(
        architecture=str(architecture),
        vocab_size=1 if table is None else table.shape[0],
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(header, keys, head_dim, path),
        tie_embeddings="output.weight" not in header.tensors,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        o_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_down.bias" in header.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in header.tensors,
        bos_token_id=next(iter(_token_ids(header, "bos")), None),
        eos_token_ids=tuple(dict.fromkeys(_token_ids(header, "eos", "eot", "eom"))),
    )
    if config.num_heads % config.num_kv_heads or head_dim % 2:
        keys.problems.append(
            f"{config.num_heads} heads, {config.num_kv_heads} key/value heads and a head size of "
            f"{head_dim} do not go together"
        )
    if keys.problems:
        listed = "\n".join(f"  - {problem}" for problem in keys.problems)
        msg = f"{path} cannot be used:\n{listed}\nUse a file without these."
        raise ModelError(msg)
    return config


def entries(header: GGUFHeader, config: ModelConfig) -> Mapping[str, Entry]:
    """The file's tensors by Hugging Face checkpoint name; unknown ones keep their own name."""
    permuted = config.architecture in _PERMUTED
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if permuted else {}
    found: dict[str, Entry] = {}
    for name, tensor in header.tensors.items():
        if name == _ROPE_FREQS:
            continue
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        layer, part, kind = match.groups() if match else (None, "", "")
        if layer is None and part in _GLOBAL:
            found[f"{_GLOBAL[part]}.{kind}"] = Entry(tensor=tensor)
        elif layer is not None and part in _LAYER:
            ours = f"model.layers.{layer}.{_LAYER[part]}.{kind}"
            found[ours] = Entry(tensor=tensor, heads=heads.get(part))
        else:
            found[name] = Entry(tensor=tensor)
    return found


def _refuse_unsupported(header: GGUFHeader, keys: _Keys, head_dim: int, max_position: int) -> None:
    """Note features that would give wrong logits if they were passed over in silence."""
    window = keys.get("attention.sliding_window")
    if isinstance(window, int) and 0 < window < max_position:
        keys.problems.append(
            f"attention uses a sliding window ({window}); supported: full attention"
        )
    if keys.get("expert_count"):
        keys.problems.append(f"it has {keys.get('expert_count')} experts; supported: dense models")
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            keys.problems.append(f"{key} is {keys.get(key)}; supported: the head size, {head_dim}")
    if keys.get("rope.scale_linear") not in (None, 1.0):
        keys.problems.append("it uses the old key rope.scale_linear; supported: rope.scaling.*")
    splits = header.metadata.get("split.count", 0)
    if isinstance(splits, int) and splits > 1:
        keys.problems.append(
            f"it is one of {splits} parts; supported: whole files (join them with llama-gguf-split "
            "--merge)"
        )


def _rope(header: GGUFHeader, keys: _Keys, head_dim: int, path: Path) -> RopeConfig:
    theta = keys.number("rope.freq_base", 10_000.0)
    kind = keys.get("rope.scaling.type") or "none"
    original = keys.get("rope.scaling.original_context_length")
    length = original if isinstance(original, int) and original > 0 else None
    if _ROPE_FREQS in header.tensors:
        return _llama3(header.tensors[_ROPE_FREQS], keys, theta, head_dim, length, path)
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = keys.number("rope.scaling.factor")
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    if kind == "yarn":
        attention = keys.get("rope.scaling.attn_factor")
        plain = RopeConfig(
            kind="yarn",
            theta=theta,
            factor=factor,
            original_max_position=length,
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        )
        if attention in (None, 1.0):
            return plain
        keys.problems.append(f"rope.scaling.attn_factor is {attention}; supported: 1.0")
        return plain
    keys.problems.append(
        f"the rope scaling is {kind!r}; supported: none, linear, yarn, and Llama 3's frequencies"
    )
    return RopeConfig(theta=theta)


def _llama3(
    tensor: GGUFTensor, keys: _Keys, theta: float, head_dim: int, length: int | None, path: Path
) -> RopeConfig:
    """Llama 3's parameters from the divisors of the frequencies, which is all that a file holds.

    The largest divisor is the factor; the others are then checked against the published rule.
    """
    context = length or _LLAMA3_CONTEXT
    divisors = torch.ones(0)
    if tensor.kind == _F32:
        raw = np.fromfile(path, dtype="<f4", count=head_dim // 2, offset=tensor.offset)
        divisors = torch.from_numpy(raw)
    found = RopeConfig(theta=theta)
    if divisors.shape == (head_dim // 2,) and bool(divisors.isfinite().all()):
        found = RopeConfig(
            kind="llama3", theta=theta, factor=float(divisors.max()), original_max_position=context
        )
        plain, _ = frequencies(RopeConfig(theta=theta), head_dim, context)
        scaled, _ = frequencies(found, head_dim, context)
        if torch.allclose(plain / divisors, scaled, rtol=1e-4, atol=0):
            return found
    keys.problems.append(
        f"{_ROPE_FREQS} does not follow Llama 3's rule (low 1, high 4, context {context}); "
        "supported: that rule"
    )
    return found


def _token_ids(header: GGUFHeader, *names: str) -> list[int]:
    """Ids of special tokens that the file names."""
    found = (header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    return [i for i in found if isinstance(i, int)]
