"""Writes a tiny checkpoint as a GGUF file, by the `gguf` package, as llama.cpp's converter would.

Said here a second time, and on purpose not by our own tables: names, and the row order of q and k.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

from tests import tiny

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
KindOf = Callable[[str], Kind]


def write_tiny_gguf(
    file: Path,
    folder: Path,
    kind: Kind | KindOf = Kind.F32,
    *,
    keys: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write the checkpoint in `folder` (one shard) as a GGUF file, with its tokenizer.

    Args:
        file: to be written.
        folder: from `tiny.write_tiny`.
        kind: format of the matrices, or a function of the GGUF name.
        keys: further metadata below the architecture's name; None leaves a key out.
        extra: further float32 tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = "llama" if config["model_type"] == "mistral" else config["model_type"]
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(file), arch)
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": hidden,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"].get("rope_theta", 1e4),
    }
    if "head_dim" in config:
        values["attention.key_length"] = values["attention.value_length"] = config["head_dim"]
    for key, value in (values | (keys or {})).items():
        _add(writer, f"{arch}.{key}", value)
    _add_tokenizer(writer)
    for name, tensor in load_file(folder / "model.safetensors").items():
        ours, count = _rename(name), {"attn_q": heads, "attn_k": kv_heads}
        part = ours.split(".")[-2]
        if arch == "llama" and part in count:  # (head, half, pair) -> (head, pair, half)
            rows = tensor.reshape(count[part], 2, -1, *tensor.shape[1:]).swapaxes(1, 2)
            tensor = np.ascontiguousarray(rows.reshape(tensor.shape))  # noqa: PLW2901
        chosen = kind if isinstance(kind, Kind) else kind(ours)
        if tensor.ndim < 2 or chosen == Kind.F32:
            writer.add_tensor(ours, tensor)
        elif chosen == Kind.F16:
            writer.add_tensor(ours, tensor.astype(np.float16))
        else:
            writer.add_tensor(ours, gguf.quantize(tensor, chosen), raw_dtype=chosen)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _rename(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{suffix}"


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    backend = json.loads(tiny.tiny_tokenizer().to_str())
    tokens = tiny.tiny_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(tiny.SPECIALS) + [1] * (len(tokens) - len(tiny.SPECIALS)))
    writer.add_token_merges([" ".join(merge) for merge in backend["model"]["merges"]])
    writer.add_bos_token_id(tiny.BOS)
    writer.add_eos_token_id(tiny.EOS)
    writer.add_chat_template(tiny.CHAT_TEMPLATE)
