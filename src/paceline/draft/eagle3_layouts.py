"""EAGLE-3 config.json -> `Eagle3Config`: one table says what each layout's keys mean.

Three projects write EAGLE-3 drafters, and a wrong guess runs without an error and accepts little:

                          SafeAILab            SpecForge             speculators
    recognised by         architectures: LlamaForCausalLMEagle3      speculators_model_type: eagle3
    the layer's keys      top level            top level             transformer_layer_config
    layer in the file     midlayer             midlayer              layers.0
    tapped layers         none named           eagle_config, counted top level, counted as inputs:
                                               as outputs            k is the output of layer k - 1
    no layers named       outputs 1, L // 2 - 1, L - 4 of the target's L layers, in all three
    norm flags            none                 top level or          top level; norm_before_residual
                                               eagle_config          must be stated
    biases                qkv_bias: q, k, v    qkv_bias, or attention_bias: these and the output's
    keys left out         transformers' defaults (speculators leaves out what equals them)

vLLM reads `norm_before_residual` as true where a speculators file lacks it, speculators itself as false:
such a file is refused. Layers named at the top level are counted as inputs there too, as vLLM does. A key
that is not known here is refused: it may change what the network computes.

Not here: tensors (`eagle3_checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from paceline.core.errors import ModelError
from paceline.draft.eagle3_config import NUM_TAPS, Eagle3Config, default_taps
from paceline.models import hf

FLAT = "LlamaForCausalLMEagle3"
_FLAT_NAMES = {FLAT, "Eagle3LlamaForCausalLM"}  # vLLM's name for the same
FLAGS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
LAYERS = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle_config"

# Keys that say something about the network, read here or by `models.hf`.
_LAYER_READ = {
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "qkv_bias",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
    "vocab_size",
}
_DRAFT_READ = {*FLAGS, LAYERS, "draft_vocab_size", "target_hidden_size", "logit_scale"}
_NESTED_READ = {*FLAGS, LAYERS}
# Keys that change nothing about what is computed here.
_PASSED_OVER = {
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "has_no_defaults_at_init",
    "initializer_range",
    "max_window_layers",
    "modal_type",
    "pad_token_id",
    "pretraining_tp",
    "target_model_type",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
_SPECULATORS_READ = {
    "embed_requires_grad",
    "enable_sp_ulysses",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "transformer_layer_config",
}
# Keys of what is not supported, with the only values at which they mean nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bias": (None, False),
    "is_causal": (None, True),
    "mlp_bias": (None, False),
    "num_aux_hidden_states": (None, NUM_TAPS),
    "parallel_drafting": (None, False),
    "use_aux_hidden_state": (None, True),
}
# What transformers' configurations hold where a file says nothing.
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
    },
    "qwen3": {
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "vocab_size": 151936,
    },
}


def read_config(folder: Path, num_target_layers: int) -> Eagle3Config:
    """Read config.json, refusing what is not understood; all problems are reported together.

    Args:
        folder: the drafter's.
        num_target_layers: L, from which taps that are not named follow.

    Raises:
        ModelError: as above.
    """
    raw = hf.read_config(folder)
    kind = raw.values.get("speculators_model_type")
    if kind is not None:
        if kind != "eagle3":
            refuse_layout(raw.where, f"a speculators model of type {kind!r}")
        return _speculators(raw, num_target_layers)
    found = raw.values.get("architectures")
    names = [str(name) for name in found] if isinstance(found, list) else []
    if not _FLAT_NAMES & set(names):
        refuse_layout(raw.where, f"the architecture {' or '.join(names) or 'none at all'}")
    return _flat(raw, num_target_layers)


def refuse_layout(where: Path, what: str) -> NoReturn:
    """Say which layouts there are.

    Raises:
        ModelError: always.
    """
    msg = (
        f"{where} holds {what}; supported are EAGLE-3 drafters as SafeAILab and SpecForge write them "
        f"(architecture {FLAT}) and as speculators does (speculators_model_type 'eagle3'). Use a "
        "drafter in one of these layouts."
    )
    raise ModelError(msg)


def _flat(raw: hf.HFConfig, num_target_layers: int) -> Eagle3Config:
    """SafeAILab's and SpecForge's: everything at the top level, and `eagle_config`."""
    nested = _object(raw, NESTED)
    _refuse_unknown(raw, set(raw.values) - {NESTED}, _LAYER_READ | _DRAFT_READ)
    _refuse_unknown(raw, set(nested), _NESTED_READ, f"{NESTED}.")
    _refuse_meaning(raw, {**raw.values, **nested})
    flags = {}
    for key in FLAGS:
        said = [x for x in (nested.get(key), raw.values.get(key)) if x is not None]
        if said and said[0] != said[-1]:
            raw.problems.append(f"{key} is {raw.values[key]!r}, but {nested[key]!r} in {NESTED}")
        flags[key] = said[0] if said else False
    taps = _taps(raw, nested.get(LAYERS), num_target_layers, counted_as_inputs=False)
    top = raw.values.get(LAYERS)
    if top:
        inputs = _taps(raw, top, num_target_layers, counted_as_inputs=True)
        if nested.get(LAYERS) and inputs != taps:
            raw.problems.append(
                f"{LAYERS} at the top level means the outputs of layers {inputs}, in {NESTED} "
                f"those of {taps}"
            )
        taps = inputs
    return _config(raw, raw, flags, taps)


def _speculators(raw: hf.HFConfig, num_target_layers: int) -> Eagle3Config:
    """speculators': the layer in an object of its own."""
    layer = _object(raw, "transformer_layer_config")
    kind = str(layer.get("model_type", "llama"))
    if kind not in _DEFAULTS:
        raw.problems.append(
            f"the layer's model_type is {kind!r}; supported: {', '.join(_DEFAULTS)}"
        )
    _refuse_unknown(raw, set(raw.values), _SPECULATORS_READ | _DRAFT_READ | {"model_type"})
    _refuse_unknown(raw, set(layer), _LAYER_READ, "transformer_layer_config.")
    _refuse_meaning(raw, {**layer, **raw.values})
    if raw.values.get("norm_before_residual") is None:
        raw.problems.append(
            "norm_before_residual is not stated, which vLLM reads as true and speculators as false; "
            "state what the drafter was trained with"
        )
    inner = hf.HFConfig({**_DEFAULTS.get(kind, {}), **layer}, {}, raw.where)
    inner.problems = raw.problems
    taps = _taps(raw, raw.values.get(LAYERS), num_target_layers, counted_as_inputs=True)
    flags = {key: raw.values.get(key) or False for key in FLAGS}
    return _config(raw, inner, flags, taps, qk_norm=kind == "qwen3")


def _config(
    draft: hf.HFConfig,
    layer: hf.HFConfig,
    flags: Mapping[str, object],
    taps: tuple[int, int, int],
    *,
    qk_norm: bool = False,
) -> Eagle3Config:
    """Put together what both layouts say; raises everything that was found so far.

    Args:
        draft: what belongs to the drafter.
        layer: what belongs to its layer; may be the same object.
        flags: by `FLAGS`.
        taps: outputs.
        qk_norm: queries and keys are normed.
    """
    problems = draft.problems
    for key, value in flags.items():
        if not isinstance(value, bool):
            problems.append(f"{key} must be true or false, it is {value!r}")
    if flags["norm_before_fc"] and flags["fc_norm"]:
        problems.append("norm_before_fc and fc_norm are both true; one of them at most")
    layers, vocabulary = layer.integer("num_hidden_layers"), layer.integer("vocab_size")
    if layers != 1:
        problems.append(f"num_hidden_layers is {layers}; supported: 1")
    drafted = draft.integer("draft_vocab_size", vocabulary)
    if drafted > vocabulary:
        problems.append(f"draft_vocab_size ({drafted}) exceeds vocab_size ({vocabulary})")
    hidden = layer.integer("hidden_size")
    target_hidden = draft.integer("target_hidden_size", hidden)
    scale = draft.number("logit_scale", 1.0)
    o_bias = layer.flag("attention_bias")
    qkv_bias = layer.flag("qkv_bias", default=o_bias)
    trained = draft.flag("embed_requires_grad")
    # Last, because it raises everything that was found so far.
    shape = layer.model_config(
        architecture="llama", qkv_bias=qkv_bias, o_bias=o_bias, qk_norm=qk_norm
    )
    return Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=vocabulary,
        draft_vocab_size=drafted,
        aux_layers=taps,
        max_position=shape.max_position,
        rope=shape.rope,
        rms_norm_eps=shape.rms_norm_eps,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
        norm_before_fc=bool(flags["norm_before_fc"]),
        fc_norm=bool(flags["fc_norm"]),
        norm_before_residual=bool(flags["norm_before_residual"]),
        norm_output=bool(flags["norm_output"]),
        own_embedding=trained or hidden != target_hidden,
        logit_scale=scale,
    )


def _object(raw: hf.HFConfig, key: str) -> Mapping[str, object]:
    found = raw.values.get(key) or {}
    if isinstance(found, Mapping):
        return found
    raw.problems.append(f"{key} must be an object, it is {found!r}")
    return {}


def _refuse_unknown(raw: hf.HFConfig, keys: set[str], read: set[str], where: str = "") -> None:
    unknown = sorted(keys - read - _PASSED_OVER - set(_NEUTRAL))
    if unknown:
        listed = ", ".join(f"{where}{key}" for key in unknown)
        raw.problems.append(f"unknown keys, which may change what is computed: {listed}")


def _refuse_meaning(raw: hf.HFConfig, values: Mapping[str, object]) -> None:
    for key, neutral in _NEUTRAL.items():
        if values.get(key) not in neutral:
            raw.problems.append(f"{key} is {values[key]!r}, a layout that is not supported")


def _taps(
    raw: hf.HFConfig, found: object, num_target_layers: int, *, counted_as_inputs: bool
) -> tuple[int, int, int]:
    """The outputs that `found` names."""
    if not found:
        return default_taps(num_target_layers)
    ids = found if isinstance(found, list) else []
    taps = [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]
    if len(taps) != NUM_TAPS or len(ids) != NUM_TAPS:
        raw.problems.append(f"{LAYERS} must be {NUM_TAPS} layer numbers, they are {found!r}")
        return default_taps(num_target_layers)
    low, middle, high = (i - counted_as_inputs for i in taps)
    return low, middle, high
