"""DFlashConfig: shape and layout of a DFlash drafter, as z-lab's config.json says them.

One table resolves what a configuration means, because public files say it in several ways and a wrong
guess runs without an error and accepts little:

    layer                                  in the block         back in the text
    full_attention                         all rows             everything
    sliding_attention                      causal               sliding_window positions
    sliding_attention, is_causal false     all rows             sliding_window positions
    any, is_causal true                    causal               as above

`is_causal` (top level) wins over `dflash_config.causal`; other values in `dflash_config` win over the
top level. Layers without `layer_types` are sliding if `dflash_config.use_swa` says so, or, as in
transformers, from `max_window_layers` on if `use_sliding_window` does. A key that is not known here is
refused: it may change what the network computes.

Not here: tensors (`dflash_checkpoint.py`), and what is computed (`dflash_net.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from paceline.core.config import ModelConfig, RopeConfig
from paceline.core.errors import ModelError
from paceline.draft.base import DraftKV
from paceline.models import hf

FULL, SLIDING = "full_attention", "sliding_attention"
FIRST, SECOND = "DFlashDraftModel", "DFlash2DraftModel"
# Far more than any drafter has. Most proposals are never verified beyond the engine's 255 nodes a row.
_MOST = {"num_hidden_layers": 256, "block_size": 256}
_WINDOW_KEYS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
# Keys that say something about the network, read here or by `models.hf`.
_READ = {
    *_WINDOW_KEYS,
    "architectures",
    "attention_bias",
    "block_size",
    "dflash_config",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "is_causal",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_target_layers",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "target_hidden_size",
    "vocab_size",
}
_READ_NESTED = {
    "block_size",
    "causal",
    "final_logit_softcapping",
    "input_embedding_scale",
    "mask_token_id",
    "num_target_layers",
    "output_multiplier",
    "sample_from_anchor",
    "swa_window_size",
    "target_hidden_size",
    "target_layer_ids",
    "use_swa",
}
# Keys that change nothing about what is computed here.
_PASSED_OVER = {
    "_name_or_path",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "model_type",
    "pad_token_id",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
_PASSED_OVER_NESTED = {"mask_token", "num_anchors", "loss_decay_gamma", "loss_type"}
# Keys of layouts that are not supported, with the only value at which they mean nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention_mode": (None, "gqa", "mha"),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "projector_type": (None, "dflash"),
    "shift_label": (None, False),
}
_SECOND_KEYS = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvConfig:
    """DFlash 2's convolutions."""

    taps: int  # rows of the block that a row is mixed from, itself included
    group: int  # channels that share a row's own kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorConfig:
    """DFlash 2's candidate selector."""

    rank: int
    top_k: int  # candidates of a position


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig:
    """Shape and layout of a DFlash network; everything that a checkpoint may choose, resolved."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int  # the length that it was made for; the target's may be longer
    block_size: int  # b: rows of a block, the newest token's included
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # taps: the outputs of these target layers, in this order
    num_target_layers: int
    target_hidden_size: int
    windows: tuple[int | None, ...]  # per layer: positions that a row sees, itself included
    causal: tuple[bool, ...]  # per layer: a row of the block sees no later one
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    sample_from_anchor: bool = False  # row i predicts the token after it, not its own
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    conv: ConvConfig | None = None
    selector: SelectorConfig | None = None

    @property
    def num_proposals(self) -> int:
        """Tokens that one block proposes: its masks, or in the anchor layout all its rows."""
        return self.block_size - (0 if self.sample_from_anchor else 1)

    @property
    def kv(self) -> DraftKV:
        """What the network caches per token."""
        return DraftKV(
            num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )

    def layer_config(self) -> ModelConfig:
        """The draft layers, in the words of `paceline.layers`."""
        return ModelConfig(
            architecture="qwen3",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position=self.max_position,
            rms_norm_eps=self.rms_norm_eps,
            rope=self.rope,
            qkv_bias=self.attention_bias,
            o_bias=self.attention_bias,
            qk_norm=True,
        )


def default_taps(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The layers that are tapped where a configuration names none: spread from 1 to N - 3."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_layers))


def read_config(folder: Path) -> DFlashConfig:
    """Read config.json, refusing what is not understood; all problems are reported together.

    Raises:
        ModelError: as above.
    """
    raw = hf.read_config(folder)
    _refuse_architecture(raw)
    return _Reader(raw).config()


class _Reader:
    """One configuration on its way to a `DFlashConfig`; problems are collected in `raw`."""

    def __init__(self, raw: hf.HFConfig) -> None:
        nested = raw.values.get("dflash_config") or {}
        if not isinstance(nested, Mapping):
            raw.problems.append(f"dflash_config must be an object, it is {nested!r}")
            nested = {}
        self._top = raw.values
        self._nested: Mapping[str, object] = nested
        # Nested values win. Windows are ours: what reads the rest supports none.
        values = {k: v for k, v in raw.values.items() if k not in _WINDOW_KEYS} | dict(nested)
        self._raw = hf.HFConfig(values, {}, raw.where)
        self._raw.problems = raw.problems

    def config(self) -> DFlashConfig:
        """Everything, or an error that lists all problems."""
        raw = self._raw
        self._refuse_unknown()
        layers = self._limited("num_hidden_layers")
        block = self._limited("block_size")
        mask = self._token("mask_token_id")
        num_target_layers = raw.integer("num_target_layers")
        windows = self._windows(layers)
        causal = self._causal(windows)
        for window, is_causal in zip(windows, causal, strict=True):
            if window is not None and not is_causal and window < block:
                raw.problems.append(
                    f"the window ({window}) is narrower than the block ({block}) in a layer that "
                    "is not causal; supported: a window of the block or more"
                )
        cap = raw.number("final_logit_softcapping", 0.0)
        taps = self._taps(num_target_layers, layers)
        target_hidden_size = raw.integer("target_hidden_size", raw.integer("hidden_size"))
        anchor = raw.flag("sample_from_anchor")
        if block == 1 and not anchor:
            raw.problems.append("block_size is 1, which leaves no mask to fill in; 2 or more")
        scales = [raw.number(k, 1.0) for k in ("input_embedding_scale", "output_multiplier")]
        bias = raw.flag("attention_bias")
        conv, selector = self._second()
        # Last, because it raises everything that was found so far.
        shape = raw.model_config(architecture="qwen3", qkv_bias=bias, o_bias=bias, qk_norm=True)
        return DFlashConfig(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_layers=layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
            max_position=shape.max_position,
            rope=shape.rope,
            rms_norm_eps=shape.rms_norm_eps,
            attention_bias=shape.qkv_bias,
            block_size=block,
            mask_token_id=mask,
            target_layer_ids=taps,
            num_target_layers=num_target_layers,
            target_hidden_size=target_hidden_size,
            windows=windows,
            causal=causal,
            sample_from_anchor=anchor,
            embedding_scale=scales[0],
            logit_scale=scales[1],
            logit_softcap=cap if cap > 0 else None,
            conv=conv,
            selector=selector,
        )

    def _second(self) -> tuple[ConvConfig | None, SelectorConfig | None]:
        """What DFlash 2 adds, if this is one."""
        raw = self._raw
        found = _SECOND_KEYS & set(raw.values)
        if SECOND not in _architectures(raw):
            if found:
                raw.problems.append(
                    f"{', '.join(sorted(found))} belong to {SECOND}, which architectures lacks"
                )
            return None, None
        conv = ConvConfig(
            taps=raw.integer("conv_kernel_size"), group=raw.integer("conv_group_size")
        )
        hidden = raw.integer("hidden_size")
        if hidden % conv.group:
            raw.problems.append(
                f"hidden_size ({hidden}) must be a multiple of conv_group_size ({conv.group})"
            )
        return conv, SelectorConfig(
            rank=raw.integer("selector_rank"), top_k=raw.integer("selector_top_k")
        )

    def _refuse_unknown(self) -> None:
        known = _READ | _READ_NESTED | _SECOND_KEYS | _PASSED_OVER | set(_NEUTRAL)
        unknown = sorted(set(self._top) - known)
        known_nested = _READ_NESTED | _SECOND_KEYS | _PASSED_OVER_NESTED | set(_NEUTRAL)
        unknown += sorted(f"dflash_config.{key}" for key in set(self._nested) - known_nested)
        if unknown:
            self._raw.problems.append(
                f"unknown keys, which may change what is computed: {', '.join(unknown)}"
            )
        for key, neutral in _NEUTRAL.items():
            value = self._raw.values.get(key)
            if value not in neutral:
                self._raw.problems.append(f"{key} is {value!r}, a layout that is not supported")

    def _limited(self, key: str) -> int:
        """A size that nothing else is compared with before memory is taken for it."""
        value, most = self._raw.integer(key), _MOST[key]
        if value <= most:
            return value
        self._raw.problems.append(f"{key} is {value}; supported: {most} at most")
        return 1 if key == "num_hidden_layers" else most

    def _token(self, key: str) -> int:
        value = self._raw.values.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        self._raw.problems.append(f"{key} must be a token id, it is {value!r}")
        return 0

    def _taps(self, num_target_layers: int, layers: int) -> tuple[int, ...]:
        found = self._raw.values.get("target_layer_ids")
        if found is None:
            return default_taps(num_target_layers, layers)
        ids = found if isinstance(found, list) else []
        taps = tuple(i for i in ids if isinstance(i, int) and not isinstance(i, bool))
        if not ids or len(taps) != len(ids):
            self._raw.problems.append(f"target_layer_ids must be layer numbers, they are {found!r}")
        return taps

    def _windows(self, layers: int) -> tuple[int | None, ...]:
        """Each layer's window; None: it sees everything."""
        top, nested, problems = self._top, self._nested, self._raw.problems
        kinds = top.get("layer_types")
        size = top.get("sliding_window")
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != layers:
                problems.append(f"layer_types must name {layers} layers, it is {kinds!r}")
                return (None,) * layers
            strange = sorted({str(k) for k in kinds} - {FULL, SLIDING})
            if strange:
                problems.append(f"layer_types {', '.join(strange)}; supported: {FULL}, {SLIDING}")
            sliding = [k == SLIDING for k in kinds]
            if any(sliding) and top.get("use_sliding_window") is False:
                problems.append("layer_types has sliding layers but use_sliding_window is false")
        elif nested.get("use_swa"):
            sliding = [True] * layers
            size = nested.get("swa_window_size", size)
        else:
            wanted = top.get("use_sliding_window") is True and size is not None
            first = top.get("max_window_layers", 28)  # transformers' default
            first = first if isinstance(first, int) else 28
            sliding = [wanted and i >= first for i in range(layers)]
        if not any(sliding):
            return (None,) * layers
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            problems.append(f"sliding layers need a window of 1 or more, it is {size!r}")
            return (None,) * layers
        return tuple(size if slides else None for slides in sliding)

    def _causal(self, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
        """Each layer's rule in the block."""
        said = self._top.get("is_causal")
        if said is None:
            said = self._nested.get("is_causal", self._nested.get("causal"))
        if said is None:
            return tuple(window is not None for window in windows)
        if not isinstance(said, bool):
            self._raw.problems.append(f"is_causal must be true or false, it is {said!r}")
        return (bool(said),) * len(windows)


def _architectures(raw: hf.HFConfig) -> list[str]:
    found = raw.values.get("architectures")
    return [str(name) for name in found] if isinstance(found, list) else []


def _refuse_architecture(raw: hf.HFConfig) -> None:
    names = _architectures(raw)
    if not {FIRST, SECOND} & set(names):
        refuse_layout(raw.where, f"the architecture {' or '.join(names) or 'none at all'}")


def refuse_layout(where: Path, what: str) -> NoReturn:
    """Say which layouts there are.

    Raises:
        ModelError: always.
    """
    msg = (
        f"{where} holds {what}; supported are DFlash drafters in z-lab's layout (architecture "
        "DFlashDraftModel or DFlash2DraftModel: config.json with dflash_config, safetensors without embedding or head). "
        "Use a drafter in that layout."
    )
    raise ModelError(msg)
