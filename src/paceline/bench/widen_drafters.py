"""Drafters widened along with their target: they propose what they proposed to the small one.

A drafter network reads the target's tapped streams and the target's embedding, both copied now, and, if it
has no head of its own, hands its hidden states to the target's. So its stream is copied like the target's,
and its layers grow as the target's layers do. It keeps its number of layers.

Written are the layouts that Paceline's own drafters are saved in: z-lab's for DFlash, SpecForge's for
EAGLE-3, whichever the old one was in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.bench.widen import TARGET, Widening
from paceline.bench.widen_axes import Axis, LayerAxes, Recipe, norm
from paceline.bench.widen_files import Part, Piece, check_shapes
from paceline.core.errors import ConfigError
from paceline.draft import dflash_checkpoint, dflash_config, eagle3_checkpoint, eagle3_layouts
from paceline.draft.base import TargetInfo
from paceline.draft.dflash_config import FIRST, SECOND, DFlashConfig
from paceline.draft.dflash_net import DFlashNet
from paceline.draft.eagle3_config import NUM_TAPS, Eagle3Config
from paceline.draft.eagle3_net import Eagle3Net
from paceline.draft.eagle3_vocabulary import D2T, T2D
from paceline.draft.selftest_static import dflash_findings, eagle3_findings, enforce
from paceline.models import hf
from paceline.models.checkpoint import Checkpoint
from paceline.models.weights import bind

_LAYER = re.compile(r"(?:layers\.\d+|midlayer)\.(.+)")
_OTHER_NAME, _OWN_NAME = "layers.0.", "midlayer."  # of EAGLE-3's layer: speculators', SpecForge's


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The sizes of a drafter's layers."""

    num_heads: int
    num_kv_heads: int
    intermediate_size: int


def drafter_part(folder: Path, plan: Widening, dtype: torch.dtype) -> Part:
    """A widened drafter, ready to be written.

    Args:
        folder: in any layout that Paceline reads.
        plan: of its target.
        dtype: of the new tensors.

    Raises:
        ModelError: files are missing or damaged, of a layout that is not supported, or tensors do not
            fit the configuration.
        ConfigError: it is no drafter of this target, or can't grow as the target does.
    """
    if folder.name == TARGET:
        msg = (
            f"a drafter folder may not be called {TARGET!r}, which is the target's beside it; any "
            "other name is possible. Rename it."
        )
        raise ConfigError(msg)
    names = hf.read_config(folder).values.get("architectures")
    if isinstance(names, list) and {FIRST, SECOND} & set(names):
        return _dflash(folder, plan, dtype)
    return _eagle3(folder, plan, dtype)


def grown(
    plan: Widening, num_heads: int, num_kv_heads: int, head_dim: int, intermediate_size: int
) -> Layers:
    """The new sizes of a drafter's layers.

    Layers of the target's own form grow to its new form; others by the factors by which it grew, whole
    ones for key/value heads.

    Args:
        plan: of the target.
        num_heads: of the drafter, as the following.
        num_kv_heads: heads of keys and values.
        head_dim: size of a head; it stays.
        intermediate_size: neurons.
    """
    old, new = plan.old, plan.new
    neurons = intermediate_size * new.intermediate_size // old.intermediate_size
    if (num_heads, num_kv_heads, head_dim) == (old.num_heads, old.num_kv_heads, old.head_dim):
        heads, keys = new.num_heads, new.num_kv_heads
    else:
        times = new.num_kv_heads // old.num_kv_heads
        heads, keys = num_heads * times, num_kv_heads * times
    return Layers(num_heads=heads, num_kv_heads=keys, intermediate_size=neurons)


def _dflash(folder: Path, plan: Widening, dtype: torch.dtype) -> Part:
    old, stream = dflash_config.read_config(folder), plan.stream
    info = _info(plan)
    enforce(dflash_findings(old, info), folder)
    if stream.num_silent:
        msg = (
            f"the drafter in {folder} norms queries and keys with the epsilon of its other norms, which "
            f"{stream.new} channels would make smaller, as they are no {stream.old} copied whole. "
            f"Possible are multiples of {stream.old}, in whole copies: choose one, or leave this drafter "
            "out (--drafter names those that are wanted, or none)."
        )
        raise ConfigError(msg)
    layers = grown(plan, old.num_heads, old.num_kv_heads, old.head_dim, old.intermediate_size)
    new = replace(
        old,
        hidden_size=stream.new,
        target_hidden_size=stream.new,
        num_heads=layers.num_heads,
        num_kv_heads=layers.num_kv_heads,
        intermediate_size=layers.intermediate_size,
        num_target_layers=plan.new.num_layers,
        target_layer_ids=tuple(plan.homes[i] for i in old.target_layer_ids),
    )
    axes = _layer_axes(old, new, stream)
    recipes = {
        "fc.weight": Recipe(copied={0: stream}, shared=stream.repeated(len(old.target_layer_ids))),
        "hidden_norm.weight": norm(stream),
        "norm.weight": norm(stream),
        **axes.recipes(),
        "candidate_selector.predecessor_codebook": Recipe(),
        "candidate_selector.successor_codebook": Recipe(),
        "candidate_selector.hidden_projection.weight": Recipe(shared=stream),
    }
    if old.conv is not None:
        # Channels that share a kernel are copied together, as groups tile the width.
        count = old.hidden_size // old.conv.group
        groups = Axis.tiled(count, count * plan.copies, plan.copies)
        kernels = groups.repeated(2 * old.conv.taps)
        for name in ("attention_conv", "mlp_conv"):
            recipes[f"{name}.base_kernel"] = Recipe(copied={2: stream})
            recipes[f"{name}.kernel_projection.weight"] = Recipe(copied={0: kernels}, shared=stream)
    net = DFlashNet(old, info, dtype=torch.float32, device="meta")
    shapes = {
        name: shape
        for binding in bind(net)
        for name, shape in zip(binding.sources, binding.shapes, strict=True)
    }
    source = Checkpoint(folder)
    check_shapes(source, shapes, ignored=net.IGNORED)
    return Part(
        name=folder.name,
        config=dflash_checkpoint.config_values(new, dtype),
        pieces=[_piece(name, name, shape, recipes, dtype) for name, shape in shapes.items()],
        source=source,
        finish=lambda _: None,
    )


def _eagle3(folder: Path, plan: Widening, dtype: torch.dtype) -> Part:
    old = eagle3_layouts.read_config(folder, plan.old.num_layers)
    enforce(eagle3_findings(old, _info(plan)), folder)
    target = plan.stream
    stream = target
    if old.hidden_size != plan.old.hidden_size:  # a width, and an embedding, of its own
        stream = Axis.tiled(old.hidden_size, old.hidden_size * plan.copies, plan.copies)
        if target.num_silent:
            msg = (
                f"the drafter in {folder} has a width of its own, {old.hidden_size}, and one epsilon "
                f"for its norms and those of the target's {target.new} channels, which would need "
                f"another. Possible are multiples of {target.old}, in whole copies: choose one, or leave "
                "this drafter out (--drafter names those that are wanted, or none)."
            )
            raise ConfigError(msg)
    layers = grown(plan, old.num_heads, old.num_kv_heads, old.head_dim, old.intermediate_size)
    low, middle, high = (plan.homes[i] for i in old.aux_layers)
    new = replace(
        old,
        hidden_size=stream.new,
        target_hidden_size=target.new,
        num_heads=layers.num_heads,
        num_kv_heads=layers.num_kv_heads,
        intermediate_size=layers.intermediate_size,
        aux_layers=(low, middle, high),
        rms_norm_eps=old.rms_norm_eps * target.live_share,
    )
    taps = target.repeated(NUM_TAPS)
    recipes = {
        "embed_tokens.weight": Recipe(copied={1: stream}),
        "input_norm.weight": norm(taps),
        **{f"fc_norm.{i}.weight": norm(target) for i in range(NUM_TAPS)},
        "fc.weight": Recipe(copied={0: stream}, shared=taps),
        "hidden_norm.weight": norm(stream),
        **_layer_axes(old, new, stream).recipes(inputs=stream.repeated(2)),
        "norm.weight": norm(stream),
        "lm_head.weight": Recipe(shared=stream),
        D2T: Recipe(),
        T2D: Recipe(),
    }
    net = Eagle3Net(old, None, dtype=torch.float32, device="meta")
    shapes = {
        name: shape
        for binding in bind(net)
        for name, shape in zip(binding.sources, binding.shapes, strict=True)
    }
    source = Checkpoint(folder)
    others = any(name.startswith(_OTHER_NAME) for name in source.shapes)
    homes = {name: name.replace(_OWN_NAME, _OTHER_NAME) if others else name for name in shapes}
    wanted = {homes[name]: shape for name, shape in shapes.items()}
    check_shapes(source, wanted, ignored=net.IGNORED)
    pieces = [_piece(name, homes[name], shape, recipes, dtype) for name, shape in shapes.items()]
    for name in (D2T, T2D):
        if name in source.shapes:
            kind = source.read(name).dtype
            pieces.append(_piece(name, name, source.shapes[name], recipes, kind))
    return Part(
        name=folder.name,
        config=eagle3_checkpoint.config_values(new, dtype),
        pieces=pieces,
        source=source,
        finish=lambda _: None,
    )


def _layer_axes(
    old: DFlashConfig | Eagle3Config, new: DFlashConfig | Eagle3Config, stream: Axis
) -> LayerAxes:
    return LayerAxes.of(
        stream,
        (old.num_heads, old.num_kv_heads),
        (new.num_heads, new.num_kv_heads),
        old.head_dim,
        Axis.tiled(old.intermediate_size, new.intermediate_size),
    )


def _piece(
    name: str,
    origin: str,
    shape: tuple[int, ...],
    recipes: Mapping[str, Recipe],
    dtype: torch.dtype,
) -> Piece:
    match = _LAYER.fullmatch(name)
    recipe = recipes[name if match is None else match[1]]
    return Piece(name=name, origin=origin, old=shape, recipe=recipe, dtype=dtype)


def _info(plan: Widening) -> TargetInfo:
    """The target's facts; nothing is computed with it, and no token's embedding is in question."""

    def ones(ids: Tensor) -> Tensor:
        return torch.ones(len(ids), plan.old.hidden_size)

    return TargetInfo(
        config=plan.old,
        device=torch.device("cpu"),
        dtype=torch.float32,
        embed=ones,
        head=ones,
    )
