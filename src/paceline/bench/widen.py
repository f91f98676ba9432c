"""A target widened to a large one's cost: the same function, many times the work.

What a step costs depends on the sizes of a network; what it accepts depends on what the network says. A
small model that was trained, widened to the sizes of an 8 B one, has both: the costs of the large, with
texts, drafters and accept lengths of the small. `docs/widened.md` has the construction, its proof and its
limits.

    stream    copied, as often as the new width is a multiple of the old
    heads     copied, each key/value head with its queries
    neurons   copied
    layers    those that are more are identities: nothing of them is added to the stream

Not here: which sizes are a large model's (`widen_shape.py`), drafters (`widen_drafters.py`), how a dimension grows (`widen_axes.py`), files (`widen_files.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.bench.widen_axes import Axis, LayerAxes, Recipe, norm
from paceline.bench.widen_files import Part, Piece, check_shapes
from paceline.bench.widen_shape import Shape
from paceline.core.config import ModelConfig
from paceline.core.errors import ConfigError, ModelError
from paceline.draft.checkpoint_folder import rope_values
from paceline.models import MODELS, ModelFiles, gguf
from paceline.models.checkpoint import Checkpoint, TensorSource
from paceline.models.gguf_header import read_gguf_header
from paceline.models.gguf_weights import open_gguf
from paceline.models.weights import bind

TARGET = "target"  # its folder
_HEAD, _TABLE = "lm_head.weight", "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_ADDS = (
    "self_attn.o_proj.",
    "mlp.down_proj.",
)  # what a layer adds to the stream comes through these
_NAMES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Widening:
    """A target before and after, and where everything went."""

    old: ModelConfig
    new: ModelConfig
    stream: Axis
    homes: tuple[int, ...]  # the new index of each old layer

    @property
    def shape(self) -> Shape:
        """The new sizes."""
        return Shape.of(self.new)

    @property
    def copies(self) -> int:
        """How often the stream is there."""
        return (self.stream.new - self.stream.num_silent) // self.stream.old

    @property
    def identities(self) -> tuple[int, ...]:
        """Layers that add nothing."""
        return tuple(i for i in range(self.new.num_layers) if i not in self.homes)


def widening(config: ModelConfig, shape: Shape, copies: int | None = None) -> Widening:
    """Decide where everything goes.

    Args:
        config: the model to widen.
        shape: the new sizes.
        copies: of the stream; channels beyond are silent. Default: as many as fit.

    Raises:
        ConfigError: the sizes do not go together; everything that is wrong is listed.
    """
    problems = _problems(config, shape, copies)
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        least = (
            f"at least {config.hidden_size} wide (best a multiple), {config.num_layers} layers, "
            f"{config.num_heads} heads, {config.num_kv_heads} key/value heads and "
            f"{config.intermediate_size} neurons"
        )
        msg = (
            f"this model cannot be widened so:\n{listed}\nPossible are {least}. Change these sizes."
        )
        raise ConfigError(msg)
    many = shape.hidden_size // config.hidden_size if copies is None else copies
    stream = Axis.tiled(config.hidden_size, shape.hidden_size, many)
    new = replace(
        config,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        intermediate_size=shape.intermediate_size,
        rms_norm_eps=config.rms_norm_eps * stream.live_share,
        tie_embeddings=False,
    )
    old_count, count = config.num_layers, shape.num_layers
    homes = tuple(i * count // old_count for i in range(old_count))  # spread evenly
    return Widening(old=config, new=new, stream=stream, homes=homes)


def _problems(config: ModelConfig, shape: Shape, copies: int | None) -> list[str]:
    sizes = {
        "hidden size": (config.hidden_size, shape.hidden_size),
        "number of layers": (config.num_layers, shape.num_layers),
        "number of heads": (config.num_heads, shape.num_heads),
        "number of key/value heads": (config.num_kv_heads, shape.num_kv_heads),
        "intermediate size": (config.intermediate_size, shape.intermediate_size),
    }
    found = [
        f"the {name} is {new}, and the model's own is {old}: it can only grow"
        for name, (old, new) in sizes.items()
        if new < old
    ]
    if found:
        return found
    heads, keys = shape.num_heads, shape.num_kv_heads
    group = config.num_heads // config.num_kv_heads
    if heads % keys:
        found.append(f"{heads} heads are no multiple of {keys} key/value heads")
    elif heads // keys < group:
        found.append(
            f"{heads} heads over {keys} key/value heads are groups of {heads // keys}, and the "
            f"model's are of {group}: a group can only grow"
        )
    if config.architecture == "llama" and shape.hidden_size % heads:
        found.append(
            f"the hidden size {shape.hidden_size} is no multiple of {heads} heads, which transformers "
            "refuses in this architecture"
        )
    most = shape.hidden_size // config.hidden_size
    if copies is not None and not 1 <= copies <= most:
        found.append(
            f"{copies} copies of the stream, {config.hidden_size} wide, do not fit "
            f"{shape.hidden_size}: 1 to {most} do"
        )
    live = (most if copies is None else copies) * config.hidden_size
    if config.qk_norm and live != shape.hidden_size:
        found.append(
            f"{shape.hidden_size} channels are no {config.hidden_size} copied whole, so the norms "
            "need a smaller epsilon; this architecture has the same one for queries and keys, where "
            "it must stay"
        )
    return found


def target_part(
    files: ModelFiles, plan: Widening, dtype: torch.dtype, finish: Callable[[Path], None]
) -> Part:
    """The widened target, ready to be written.

    Args:
        files: of the model to widen.
        plan: from `widening` of its configuration.
        dtype: of the new tensors.
        finish: adds the tokenizer to the folder.

    Raises:
        ModelError: files are missing or damaged, or the model cannot be said in the new layout.
    """
    config = config_values(plan.new, dtype)
    source = _source(files, dtype)
    # The head of a model that says it is tied, but holds one that differs, is that one, as in `load`.
    tied = _HEAD not in source.shapes
    recipes = target_recipes(plan)
    pieces = []
    old_shapes = _shapes(replace(plan.old, tie_embeddings=tied))
    check_shapes(source, old_shapes, ignored=MODELS.get(plan.old.architecture).IGNORED)
    old_layers = {home: i for i, home in enumerate(plan.homes)}
    for name, shape in _shapes(plan.new).items():
        match = _LAYER.fullmatch(name)
        if match is None:
            origin = _TABLE if name == _HEAD and tied else name
            recipe = recipes.get(name)
        else:
            layer, rest = int(match[1]), match[2]
            near = max(home for home in plan.homes if home <= layer)
            origin = f"model.layers.{old_layers[near]}.{rest}"
            recipe = recipes.get(rest)
            if layer != near and rest.startswith(_ADDS):
                recipe = replace(recipe or Recipe(), zero=True)
        if recipe is None:
            msg = (
                f"{plan.old.architecture} has a tensor {name}, and nothing says how it grows; what "
                f"can grow are {', '.join(recipes)}. Widen a model of another architecture."
            )
            raise ModelError(msg)
        piece = Piece(name=name, origin=origin, old=old_shapes[origin], recipe=recipe, dtype=dtype)
        assert piece.spec.shape == shape, f"{name}: shape"
        pieces.append(piece)
    return Part(name=TARGET, config=config, pieces=pieces, source=source, finish=finish)


def target_recipes(plan: Widening) -> dict[str, Recipe]:
    """What becomes of a target's tensors: by whole name, and for those of a layer by its end."""
    old, new, stream = plan.old, plan.new, plan.stream
    layer = LayerAxes.of(
        stream,
        (old.num_heads, old.num_kv_heads),
        (new.num_heads, new.num_kv_heads),
        old.head_dim,
        Axis.tiled(old.intermediate_size, new.intermediate_size),
    )
    return {
        _TABLE: Recipe(copied={1: stream}),
        **layer.recipes(),
        "model.norm.weight": norm(stream),
        _HEAD: Recipe(shared=stream),
    }


def config_values(config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    """The object of config.json that says this configuration in Hugging Face's keys.

    Raises:
        ModelError: the architecture has no name there, or no keys for these biases.
    """
    kind = config.architecture
    biases = (config.qkv_bias, config.o_bias, config.mlp_bias)
    sayable = {
        "llama": config.qkv_bias == config.o_bias,
        "qwen2": biases == (True, False, False),
        "qwen3": config.qkv_bias == config.o_bias and not config.mlp_bias,
    }
    if not sayable.get(kind, False):
        msg = (
            f"a widened {kind!r} with biases on query, key and value: {biases[0]}, attention's output: "
            f"{biases[1]}, feed-forward: {biases[2]} cannot be written as a Hugging Face folder; "
            f"possible are {', '.join(_NAMES)} with the biases that they have there. Widen one of these."
        )
        raise ModelError(msg)
    values: dict[str, object] = {
        "architectures": [_NAMES[kind]],
        "model_type": kind,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "use_cache": True,
    }
    if kind == "qwen2":
        values["use_sliding_window"] = False
    else:
        values["attention_bias"] = config.qkv_bias
    if kind == "llama":
        values["mlp_bias"] = config.mlp_bias
    if kind == "qwen3":
        values["use_sliding_window"] = False
    return values | rope_values(config.rope)


def _source(files: ModelFiles, dtype: torch.dtype) -> TensorSource:
    if files.kind == "folder":
        return Checkpoint(files.path)
    header = read_gguf_header(files.path)
    config = gguf.model_config(header, files.path)
    source, _ = open_gguf(files.path, gguf.entries(header, config), dtype)
    return source


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model, by checkpoint name."""
    net = MODELS.get(config.architecture)(config, dtype=torch.float32, device="meta")
    return {
        name: shape
        for binding in bind(net)
        for name, shape in zip(binding.sources, binding.shapes, strict=True)
    }
