"""Op name -> implementation for a device and dtype, with the reason why the others are refused.

Lines are strings, so that nothing is imported or compiled before it is asked for. The choice is a
pure function of (op, device type, dtype) on one machine, and is remembered.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.ops.calls import announced

Op = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One implementation of an op: where it is, and who says whether it can run."""

    name: str
    target: str  # "module:function"
    devices: tuple[str, ...] = ()  # device types; empty: any
    refuses: str | None = None  # "module:function" of (dtype) -> reason or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What `explain` says of one implementation."""

    op: str
    name: str
    reason: str | None  # why it is refused; None: it could run
    chosen: bool


def _reference(target: str) -> Line:
    return Line(name="torch", target=f"paceline.ops.reference.{target}")


def _native(target: str, refuses: str = "native:refusal") -> Line:
    own = "paceline.ops.cpu."
    return Line(name="own", target=own + target, devices=("cpu",), refuses=own + refuses)


def _triton(target: str) -> Line:
    own = "paceline.ops.triton."
    refuses = own + "refusal:refusal"
    return Line(name="triton", target=own + target, devices=("cuda",), refuses=refuses)


_BY_ROWS = "torch, rows in numbers that agree"
_ROWS = Line(name=_BY_ROWS, target="paceline.ops.cpu.dense:linear", devices=("cpu",))
_ROWS_F32 = Line(name=_BY_ROWS, target="paceline.ops.cpu.dense:linear_f32", devices=("cpu",))

# What a pick takes are a step's nodes and the rows' options, so its implementations lie there.
_PICK = (
    Line(
        name="torch, position by position",
        target="paceline.sample.sampler:choose_host",
        devices=("cpu",),
    ),
    Line(
        name="triton",
        target="paceline.sample.device:choose_by_kernels",
        devices=("cuda",),
        refuses="paceline.ops.triton.refusal:refusal",
    ),
    Line(name="torch", target="paceline.sample.sampler:choose"),
)

# `pack_dense` and `pack_groups` choose a matrix's layout, and with it the product; `linear` and
# `linear_f32` are for matrices that were not packed.
OPS: dict[str, tuple[Line, ...]] = {
    **{
        op: (_native(f"fused:{op}"), _triton(f"fused:{op}"), _reference(f"fused:{op}"))
        for op in ("rms_norm", "add_rms_norm", "rope", "silu_mul", "kv_write")
    },
    "embedding": (_triton("embedding:embedding"), _reference("embedding:embedding")),
    "rope_write": (_triton("fused:rope_write"), _reference("fused:rope_write")),
    "context_write": (
        _triton("context:context_write"),
        Line(name="torch", target="paceline.ops.context:stacked"),
    ),
    "peaks": (_native("peaks:peaks", "peaks:refusal"), _reference("peaks:peaks")),
    "largest": (
        _triton("largest:largest"),
        Line(name="torch", target="paceline.ops.largest:largest"),
    ),
    "pick": _PICK,
    "select": (_triton("tree:select"), _reference("tree:select")),
    "keyed_noise": (
        _triton("candidates:keyed_noise"),
        Line(name="torch", target="paceline.sample.noise:keyed_noise"),
    ),
    "noise_ahead": (
        _triton("candidates:noise_ahead"),
        Line(name="torch", target="paceline.sample.noise:noise_ahead"),
    ),
    **{op: (_triton(f"chain:{op}"), _reference(f"chain:{op}")) for op in ("chain", "emitted")},
    "best_first": (_triton("growth:best_first"), _reference("growth:best_first")),
    **{
        op: (_triton(f"candidates:{op}"), _reference(f"candidates:{op}"))
        for op in ("rank_candidates", "learn")
    },
    **{
        op: (_triton(f"{place}:{op}"), _reference(f"verify:{op}"))
        for place, names in (
            ("tree", ("verify_inputs", "draft_inputs", "pick_places")),
            ("walk", ("judge", "advance", "compact")),
            ("move", ("move_paths",)),
        )
        for op in names
    },
    "linear": (_ROWS, _triton("linear:linear"), _reference("linear:linear")),
    "linear_f32": (_ROWS_F32, _triton("linear:linear_f32"), _reference("linear:linear_f32")),
    "linear_add_rms_norm": (
        _triton("linear:linear_add_rms_norm"),
        Line(name="two operators", target="paceline.ops.composed:linear_add_rms_norm"),
    ),
    "linear_swiglu": (Line(name="two operators", target="paceline.ops.composed:linear_swiglu"),),
    "pack_dense": (
        _native("dense:pack"),
        Line(name="plain tensor", target="paceline.ops.cpu.dense:plain"),
    ),
    "pack_groups": (
        _native("groups:pack", "groups:refusal"),
        Line(name="torch int4", target="paceline.ops.cpu.groups:pack_torch", devices=("cpu",)),
    ),
}


def _load(target: str) -> Op:
    module, _, attr = target.partition(":")
    found: Op = getattr(importlib.import_module(module), attr)
    return found


def _reason(line: Line, device_type: str, dtype: torch.dtype) -> str | None:
    if line.devices and device_type not in line.devices:
        return f"runs on {', '.join(line.devices)} only"
    if line.refuses is None:
        return None
    reason: str | None = _load(line.refuses)(dtype)
    return reason


def explain(op: str, device_type: str, dtype: torch.dtype) -> list[Choice]:
    """Say for every implementation of `op` whether it is chosen, possible or refused, and why."""
    choices: list[Choice] = []
    taken = False
    for line in OPS[op]:
        reason = _reason(line, device_type, dtype)
        chosen = reason is None and not taken
        taken = taken or chosen
        choices.append(Choice(op=op, name=line.name, reason=reason, chosen=chosen))
    return choices


_chosen: dict[tuple[str, str, torch.dtype], Op] = {}


def implementation(op: str, device_type: str, dtype: torch.dtype) -> Op:
    """Return the first implementation of `op` that does not refuse.

    Remembered in a plain dict: torch.compile follows a look-up, but breaks off at an import behind
    functools.cache. What is compiled should have run once before.
    """
    found = _chosen.get((op, device_type, dtype))
    if found is None:
        found = _chosen[op, device_type, dtype] = _choose(op, device_type, dtype)
    return found


def _choose(op: str, device_type: str, dtype: torch.dtype) -> Op:
    for line in OPS[op]:
        if _reason(line, device_type, dtype) is None:
            return announced(op, line.name, _load(line.target))
    msg = f"no implementation of {op} for {dtype} on {device_type}"
    raise NotImplementedError(msg)
