"""Rotary embedding in config.json -> RopeConfig, in both generations of its keys.

transformers 4 has `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast, get_args

from paceline.core.config import RopeConfig, RopeKind


def read_rope(config: Mapping[str, object], max_position: int, problems: list[str]) -> RopeConfig:
    """Read the rotary embedding; `rope_scaling` wins over `rope_parameters`, both over top-level keys.

    Args:
        config: the object of config.json.
        max_position: the context length that it states.
        problems: what is wrong is appended here.
    """
    raw = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(raw, Mapping):
        problems.append(f"rope parameters must be an object, they are {raw!r}")
        return RopeConfig()
    if any(isinstance(value, Mapping) for value in raw.values()):
        problems.append(
            f"rope parameters differ by layer type ({', '.join(raw)}); supported: one for all layers"
        )
        return RopeConfig()
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind not in get_args(RopeKind):
        problems.append(f"the rope type is {kind!r}; supported: {', '.join(get_args(RopeKind))}")
        return RopeConfig()
    theta = raw.get("rope_theta", config.get("rope_theta"))
    partial = raw.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        problems.append(
            f"partial_rotary_factor is {partial!r}; supported: 1.0, all of a head is rotated"
        )
    values = {key: value for key, value in raw.items() if value is not None}

    def number(key: str, default: float) -> float:
        return finite(key, values[key], default, problems) if key in values else default

    def optional(key: str) -> float | None:
        return finite(key, values[key], 1.0, problems) if key in values else None

    # As in transformers: a top-level value wins, and yarn's factor follows from it.
    length = config.get("original_max_position_embeddings") or values.get(
        "original_max_position_embeddings"
    )
    original = None if length is None else finite("original length", length, 1.0, problems)
    factor = number("factor", max_position / original if original else 0.0)
    if kind != "default" and not (factor > 0 and ("factor" in values or kind == "yarn")):
        problems.append(f"rope type {kind!r} needs a factor above 0, it has none")
    base = 10_000.0 if theta is None else finite("rope_theta", theta, 10_000.0, problems)
    if base <= 1:
        problems.append(f"rope_theta must be above 1, it is {base}")
    problems += [
        f"{key} must be above 0, it is {values[key]!r}"
        for key in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        if number(key, 1.0) <= 0 and key in values
    ]
    if original is not None and original < 1:
        problems.append(f"the original length must be above 0, it is {original}")
    return RopeConfig(
        kind=cast("RopeKind", kind),
        theta=base if base > 1 else 10_000.0,
        factor=1.0 if kind == "default" else factor,
        original_max_position=None if original is None else int(original),
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        beta_fast=number("beta_fast", 32.0) or 32.0,
        beta_slow=number("beta_slow", 1.0) or 1.0,
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=bool(values.get("truncate", True)),
    )


def finite(key: str, value: object, default: float, problems: list[str]) -> float:
    """A finite number; else the default, and a problem more."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    problems.append(f"{key} must be a number, it is {value!r}")
    return default
