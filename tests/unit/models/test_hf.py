from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import models
from paceline.core.config import ModelConfig, RopeConfig
from paceline.core.errors import ModelError
from tests import tiny


def read(folder: Path, architecture: str = "llama", **changes: Any) -> ModelConfig:
    """Write a config.json with these changes and read it; ... leaves a key out."""
    tiny.write_tiny(folder, architecture)
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    return models.read_config(models.resolve(str(folder)))


def test_every_field_is_read(tmp_path: Path) -> None:
    """What the file says is what the network is built from."""
    found = read(
        tmp_path,
        "qwen3",
        eos_token_id=[2, 5],
        bos_token_id=1,
        rms_norm_eps=1e-4,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    assert found == ModelConfig(
        architecture="qwen3",
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position=256,
        rms_norm_eps=1e-4,
        rope=RopeConfig(theta=1e6),
        tie_embeddings=True,
        qkv_bias=True,
        o_bias=True,
        qk_norm=True,
        bos_token_id=1,
        eos_token_ids=(2, 5),
    )


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_missing_keys_have_transformers_defaults(tmp_path: Path, architecture: str) -> None:
    """A key that transformers may leave out means what transformers takes it to mean."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle")
    gone = dict.fromkeys(
        ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "rope_parameters"), ...
    )
    found = read(tmp_path, architecture, head_dim=..., num_attention_heads=8, **gone)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert found.rms_norm_eps == theirs.rms_norm_eps
    assert found.tie_embeddings == theirs.tie_word_embeddings
    assert found.head_dim == (getattr(theirs, "head_dim", None) or 64 // 8)
    assert found.rope.theta == theirs.rope_parameters["rope_theta"]
    assert found.num_kv_heads == 8


def test_end_of_text_ids_come_from_both_files(tmp_path: Path) -> None:
    """Chat models name the end of a turn in one file and the end of text in the other."""
    tiny.write_tiny(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 2]}')
    assert models.read_config(models.resolve(str(tmp_path))).eos_token_ids == (9, 2)


OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, tuple[dict[str, Any], RopeConfig]] = {
    "old default": (
        {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": None},
        RopeConfig(theta=5e5),
    ),
    "old linear": (
        {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2}},
        RopeConfig(kind="linear", factor=2.0),
    ),
    "old yarn": (
        {"rope_parameters": ..., "rope_theta": 1e6, "rope_scaling": OLD_YARN},
        RopeConfig(kind="yarn", theta=1e6, factor=4.0, original_max_position=64),
    ),
    "new": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}},
        RopeConfig(kind="linear", factor=2.0, theta=7.0),
    ),
    "new with theta outside": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 7.0},
        RopeConfig(kind="linear", factor=2.0, theta=7.0),
    ),
    "yarn factor from the lengths": (
        {
            "rope_parameters": {"rope_type": "yarn", "factor": None},
            "original_max_position_embeddings": 128,
        },
        RopeConfig(kind="yarn", factor=2.0, original_max_position=128),
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_both_generations_of_rope_keys_are_read(tmp_path: Path, name: str) -> None:
    """Transformers 4's and 5's keys say the same thing."""
    keys, expected = ROPES[name]
    assert read(tmp_path, **keys).rope == expected


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": (
        "llama",
        {"architectures": ["GemmaForCausalLM"]},
        r"'GemmaForCausalLM'; supported are LlamaForCausalLM, MistralForCausalLM, Qwen2.*Use",
    ),
    "no architecture": ("llama", {"architectures": ...}, "none at all; supported are Llama"),
    "rope type": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope type is 'dynamic'; supported: default, linear, llama3, yarn",
    ),
    "old rope type": (
        "qwen2",
        {"rope_scaling": {"type": "longrope"}},
        "rope type is 'longrope'; supported",
    ),
    "rope without factor": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3"}},
        "'llama3' needs a factor above 0",
    ),
    "rope by layer": (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        r"differ by layer type \(full_attention\); supported: one",
    ),
    "partial rope": (
        "llama",
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor is 0.5; supported: 1.0",
    ),
    "mistral's window": (
        "mistral",
        {"sliding_window": 128},
        r"sliding window \(128\); supported: full attention",
    ),
    "mistral's default window": (
        "mistral",
        {"sliding_window": ..., "max_position_embeddings": 32768},
        r"sliding window \(4096\)",
    ),
    "qwen's window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 64},
        r"sliding window \(64\)",
    ),
    "windowed layers": (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types are full_attention, sliding_attention; supported: full_attention",
    ),
    "quantised": (
        "llama",
        {"quantization_config": {"quant_method": "awq"}},
        r"quantised \(awq\); supported: unquantised safetensors, or a GGUF",
    ),
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
    "missing size": ("llama", {"hidden_size": ...}, "hidden_size must be a positive whole.*None"),
    "no number": ("llama", {"rms_norm_eps": "x"}, "rms_norm_eps must be a number, it is 'x'"),
    "no flag": ("llama", {"mlp_bias": "yes"}, "mlp_bias must be true or false, it is 'yes'"),
    "odd heads": (
        "llama",
        {"num_key_value_heads": 3},
        r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)",
    ),
    "indivisible": ("llama", {"num_attention_heads": 6}, r"hidden_size \(64\) must be a multiple"),
    "odd head size": ("llama", {"head_dim": 15}, r"head size \(15\) must be even"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_wrongly_is_refused(tmp_path: Path, name: str) -> None:
    """The message says what the file asks for, what is possible and what to do."""
    architecture, changes, message = REFUSED[name]
    with pytest.raises(ModelError, match=f"(?s){message}") as caught:
        read(tmp_path, architecture, **changes)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "Use a checkpoint" in str(caught.value)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    """Nobody mends one problem to meet the next."""
    with pytest.raises(ModelError) as caught:
        read(tmp_path, hidden_act="relu", vocab_size=-1, partial_rotary_factor=0.25)
    for word in ("relu", "vocab_size", "partial_rotary_factor"):
        assert word in str(caught.value)


@pytest.mark.parametrize("keys", [{"use_sliding_window": False}, {"max_window_layers": 1}])
def test_a_window_that_is_off_or_never_binds_is_none(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Qwen's files carry a window that is switched off; one as wide as the context hides nothing."""
    assert read(tmp_path, "qwen2", sliding_window=256, **keys).num_layers == 2


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    """A half-written config.json is named, not traced back."""
    tiny.write_tiny(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json .*must be a JSON object.* Download it"):
        models.read_config(models.resolve(str(tmp_path)))
