"""config.json in Hugging Face form -> ModelConfig, refusing what would be computed wrongly.

Missing keys have the value that transformers gives them. All problems of a file are reported at once.
Rotary embedding is read by hf_rope.py; what differs by architecture is said in the model's own `from_hf`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from paceline.core.config import ModelConfig
from paceline.core.errors import ModelError
from paceline.models.hf_rope import finite, read_rope

# Hugging Face's architecture name -> our registry's name.
ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_LARGEST = 1 << 31  # far above any model; PyTorch takes no sizes beyond 64 bits
_MISTRAL_WINDOW = 4096  # transformers' default where the key is missing


class HFConfig:
    """Typed access to a config.json; problems are collected and raised together by `check`.

    Args:
        values: the file's object.
        generation: the object of generation_config.json, or empty.
        where: the file, for messages.
    """

    def __init__(
        self, values: Mapping[str, object], generation: Mapping[str, object], where: Path
    ) -> None:
        self.values = values
        self.generation = generation
        self.where = where
        self.problems: list[str] = []

    @property
    def architecture(self) -> str:
        """Our registry's name of the architecture.

        Raises:
            ModelError: the architecture is not supported.
        """
        names = self.values.get("architectures")
        found = [n for n in names if isinstance(n, str)] if isinstance(names, list) else []
        for name in found:
            if name in ARCHITECTURES:
                return ARCHITECTURES[name]
        asked = " or ".join(map(repr, found)) if found else "none at all"
        msg = (
            f"{self.where} names the architecture {asked}; supported are "
            f"{', '.join(ARCHITECTURES)}. Use a checkpoint of one of these."
        )
        raise ModelError(msg)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive whole number; without a default the key must be there."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST:
            return value
        self.problems.append(f"{key} must be a positive whole number, it is {value!r}")
        return 1

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        value = self.values.get(key)
        return default if value is None else finite(key, value, default, self.problems)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """A yes or no."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{key} must be true or false, it is {value!r}")
        return bool(value)

    def model_config(
        self,
        *,
        architecture: str,
        qkv_bias: bool = False,
        o_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        head_dim: int | None = None,
    ) -> ModelConfig:
        """What every supported architecture has in common.

        Args:
            architecture: our registry's name.
            qkv_bias: query, key and value projections have biases.
            o_bias: the attention's output projection has one.
            mlp_bias: the feed-forward projections have them.
            qk_norm: queries and keys are normed per head.
            head_dim: where the file gives none; default: hidden size / heads.

        Raises:
            ModelError: anything is missing, malformed or not supported; all of it is listed.
        """
        self._refuse_unsupported()
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", heads)
        dim = self.integer("head_dim", head_dim or max(hidden // heads, 1))
        if heads % kv_heads:
            self.problems.append(
                f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
            )
        if "head_dim" not in self.values and head_dim is None and hidden % heads:
            self.problems.append(
                f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads}), "
                "or head_dim be given"
            )
        if dim % 2:
            self.problems.append(f"the head size ({dim}) must be even")
        max_position = self.integer("max_position_embeddings")
        config = ModelConfig(
            architecture=architecture,
            vocab_size=self.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self.integer("intermediate_size"),
            num_layers=self.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            max_position=max_position,
            rms_norm_eps=self._positive("rms_norm_eps", self.number("rms_norm_eps", 1e-6)),
            rope=read_rope(self.values, max_position, self.problems),
            tie_embeddings=self.flag("tie_word_embeddings"),
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            bos_token_id=next(iter(_ids(self.values.get("bos_token_id"))), None),
            eos_token_ids=self._eos_token_ids(),
        )
        self.check()
        return config

    def check(self) -> None:
        """Raise a ModelError that lists every problem found so far, if there is one."""
        if self.problems:
            listed = "\n".join(f"  - {p}" for p in self.problems)
            msg = f"{self.where} cannot be used:\n{listed}\nUse a checkpoint without these."
            raise ModelError(msg)

    def _positive(self, key: str, value: float) -> float:
        """A number above 0; another would compute NaN without a word."""
        if value > 0:
            return value
        self.problems.append(f"{key} must be above 0, it is {value}")
        return 1.0

    def _eos_token_ids(self) -> tuple[int, ...]:
        """End-of-text ids of both files, generation_config.json's first, as it is the newer."""
        found = _ids(self.generation.get("eos_token_id")) + _ids(self.values.get("eos_token_id"))
        return tuple(dict.fromkeys(found))

    def _refuse_unsupported(self) -> None:
        """Features that would give wrong logits if they were passed over in silence."""
        act = self.values.get("hidden_act", "silu")
        if act != "silu":
            self.problems.append(f"hidden_act is {act!r}; supported: 'silu'")
        quantised = self.values.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
            self.problems.append(
                f"the weights are quantised ({method or 'unknown method'}); supported: "
                "unquantised safetensors, or a GGUF file"
            )
        window = self._window()
        if window is not None:
            self.problems.append(
                f"attention uses a sliding window ({window}); supported: full attention in every layer"
            )
        elif any(kind != "full_attention" for kind in _list(self.values.get("layer_types"))):
            kinds = sorted({str(kind) for kind in _list(self.values.get("layer_types"))})
            self.problems.append(
                f"layer_types are {', '.join(kinds)}; supported: full_attention in every layer"
            )

    def _window(self) -> object:
        """The sliding window if it is ever narrower than the context, else None."""
        window = self.values.get("sliding_window")
        names = _list(self.values.get("architectures"))
        if "sliding_window" not in self.values and "MistralForCausalLM" in names:
            window = _MISTRAL_WINDOW
        if "use_sliding_window" in self.values:
            window = (window or "on") if self.values["use_sliding_window"] else None
        context = self.values.get("max_position_embeddings")
        if isinstance(window, int) and isinstance(context, int) and window >= context:
            return None
        return window


def read_config(folder: Path) -> HFConfig:
    """Read a folder's config.json, and generation_config.json if there is one.

    Raises:
        ModelError: config.json is missing or no JSON object.
    """
    config = _read_object(folder / "config.json")
    if config is None:
        msg = (
            f"{folder} has no config.json; a folder in Hugging Face layout has config.json, "
            "*.safetensors and tokenizer.json. Check the path, or whether the download was complete."
        )
        raise ModelError(msg)
    return HFConfig(
        config, _read_object(folder / "generation_config.json") or {}, folder / "config.json"
    )


def _read_object(path: Path) -> Mapping[str, object] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        msg = f"{path} is unreadable ({error}); it must be a JSON object. Download it again."
        raise ModelError(msg) from error
    if not isinstance(found, dict):
        msg = f"{path} holds a {type(found).__name__}; it must be a JSON object. Download it again."
        raise ModelError(msg)
    return found


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _ids(value: object) -> list[int]:
    """Token ids from a number, a list of numbers, or null."""
    found = value if isinstance(value, list) else [value]
    return [i for i in found if isinstance(i, int) and not isinstance(i, bool)]
