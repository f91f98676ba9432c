"""Tiny random checkpoints of every architecture, as real files: the real loading code reads them.

Two layers, hidden size 64, 97 tokens, weights from a seed. Weights are scaled so that logits have a
standard deviation of about 2 and greedy text does not get stuck in one token.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

UNK, BOS, EOS = 0, 1, 2
SPECIALS = ("<unk>", "<|im_start|>", "<|im_end|>")
LOGIT_STD = 2.0
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MERGES = (
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("i", "n"),
    ("in", "g"),
    ("a", "n"),
    ("an", "d"),
    ("Ġ", "and"),
    ("e", "r"),
    ("o", "n"),
    ("o", "f"),
    ("Ġ", "of"),
)

_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "use_sliding_window": False,
        "attention_bias": False,
        "head_dim": 32,  # not hidden_size / heads
    },
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Name -> (architecture, options): what a loader and a network must get right.
VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-sharded": ("llama", {"shards": 3}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "llama-old-keys": (  # as transformers 4 writes them
        "llama",
        {
            "rope_parameters": None,
            "rope_theta": 500.0,
            "rope_scaling": {k: v for k, v in _LLAMA3.items() if k != "rope_theta"},
        },
    ),
    "mistral": ("mistral", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "shards": 2}),
    "qwen2-yarn": (
        "qwen2",
        {"rope_parameters": {**_YARN, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}},
    ),
    "qwen2-yarn-mscale": (
        "qwen2",
        {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": {**_YARN, "attention_factor": 1.25}}),
}


def write_variant(folder: Path, variant: str, *, seed: int = 0) -> Path:
    """Write the checkpoint that `VARIANTS` names; returns the folder."""
    architecture, options = VARIANTS[variant]
    return write_tiny(folder, architecture, seed=seed, **options)


def write_tiny(
    folder: Path, architecture: str = "llama", *, seed: int = 0, shards: int = 1, **overrides: Any
) -> Path:
    """Write config.json, weights, tokenizer and chat template in Hugging Face layout.

    Args:
        folder: made if it is missing.
        architecture: llama, mistral, qwen2 or qwen3.
        seed: of the weights.
        shards: safetensors files; more than one come with an index.
        overrides: keys of config.json; None leaves the key out, except for `sliding_window`.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**_COMMON, **_ARCHITECTURES[architecture], "model_type": architecture}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    config |= overrides
    config = {k: v for k, v in config.items() if v is not None or k == "sliding_window"}
    tensors = _weights(architecture, config, seed)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": [EOS]})
    _write_shards(folder, tensors, shards)
    _write_tokenizer(folder)
    return folder


def _weights(architecture: str, config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    hidden, inner, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", hidden // heads)
    qkv_bias = architecture == "qwen2" or config.get("attention_bias", False)
    tensors: dict[str, torch.Tensor] = {}

    def normal(name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        # Keyed by name, so that an option changes no other tensor.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        tensors[name] = torch.randn(*shape, generator=generator) * std + mean

    def linear(name: str, rows: int, columns: int, gain: float, *, bias: bool) -> None:
        normal(f"{name}.weight", rows, columns, std=gain * columns**-0.5)
        if bias:
            normal(f"{name}.bias", rows, std=0.3)

    def norm(name: str, size: int) -> None:
        normal(f"{name}.weight", size, std=0.2, mean=1.0)

    head_std = LOGIT_STD * hidden**-0.5
    normal("model.embed_tokens.weight", vocab, hidden, std=head_std)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm", hidden)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            linear(f"{layer}.self_attn.{name}_proj", count * dim, hidden, 1.4, bias=qkv_bias)
        o_bias = config.get("attention_bias", False)
        linear(f"{layer}.self_attn.o_proj", hidden, heads * dim, 1.4, bias=o_bias)
        if architecture == "qwen3":
            norm(f"{layer}.self_attn.q_norm", dim)
            norm(f"{layer}.self_attn.k_norm", dim)
        norm(f"{layer}.post_attention_layernorm", hidden)
        mlp_bias = config.get("mlp_bias", False)
        linear(f"{layer}.mlp.gate_proj", inner, hidden, 1.4, bias=mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, hidden, 1.4, bias=mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, 1.4, bias=mlp_bias)
    # Signs of both kinds: else the last token's own embedding, which is still in the stream, would
    # make a tied model repeat it for ever.
    normal("model.norm.weight", hidden, std=1.0)
    if not config["tie_word_embeddings"]:
        normal("lm_head.weight", vocab, hidden, std=head_std)
    return tensors


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _write_shards(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    homes = {
        name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors"
        for i, name in enumerate(tensors)
    }
    for file in sorted(set(homes.values())):
        part = {name: tensor for name, tensor in tensors.items() if homes[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": homes}
    _write_json(folder / "model.safetensors.index.json", index)


def tiny_vocabulary() -> list[str]:
    """The 97 tokens: specials, ASCII letters, digits, punctuation, the bytes of "é", merges."""
    lower = "abcdefghijklmnopqrstuvwxyz"
    plain = [*lower, *lower.upper(), *"0123456789", "Ġ", "Ċ", "Ã", "©", *".,:;!?'\"()-_/<>|"]
    return [*SPECIALS, *plain, *(a + b for a, b in _MERGES)]


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE over `tiny_vocabulary`; bytes that it lacks become <unk>."""
    vocabulary = {token: i for i, token in enumerate(tiny_vocabulary())}
    found = tokenizers.Tokenizer(models.BPE(vocabulary, list(_MERGES), unk_token=SPECIALS[UNK]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIALS])
    return found


def _write_tokenizer(folder: Path) -> None:
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": SPECIALS[UNK],
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[EOS],
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)
