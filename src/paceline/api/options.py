"""Flat option names for the nested config: what `LLM(...)` and the command line accept.

One table, derived from the config dataclasses, maps a flat name ("max_len", "spec") to a field
(`EngineConfig.cache.max_len`, `EngineConfig.draft.method`). Names are the fields' own, except where
two parts share one. Also here: vLLM's `--speculative-config` keys, and the check of plain values
against the fields' types. Not for: what values mean (the engine's `resolve` checks ranges).
"""

from __future__ import annotations

import difflib
import functools
import json
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.core.config import CacheConfig, DraftConfig, EngineConfig
from paceline.core.errors import ConfigError

Part = Literal["engine", "cache", "draft"]

_PARTS: dict[Part, type[EngineConfig | CacheConfig | DraftConfig]] = {
    "engine": EngineConfig,
    "cache": CacheConfig,
    "draft": DraftConfig,
}
_RENAMED = {
    ("draft", "method"): "spec",
    ("draft", "model"): "spec_model",
    ("draft", "num_speculative_tokens"): "spec_nodes",
    ("draft", "parts"): "spec_parts",
    ("draft", "weights"): "spec_weights",
    ("draft", "check"): "spec_check",
}
# Other names for the same option: the field's own, and what vLLM calls it.
ALIASES: dict[str, tuple[str, ...]] = {
    "spec": ("spec_method",),
    "spec_nodes": ("num_speculative_tokens", "spec_tokens"),
    "max_len": ("max_model_len",),
    "max_rows": ("max_num_seqs",),
}
# vLLM's keys whose meaning equals one of our fields under another name.
_VLLM_KEYS = {
    "suffix_decoding_max_tree_depth": "suffix_max_depth",
    "suffix_decoding_max_spec_factor": "suffix_max_spec_factor",
    "suffix_decoding_min_token_prob": "suffix_min_token_prob",
}
_VLLM_WITHOUT_EQUAL = {
    "suffix_decoding_max_cached_requests": "suffix_max_cached_tokens (tokens, not requests)",
    "disable_by_batch_size": "adaptive (drafting stops where it does not pay; not yet for networks on a GPU)",
    "num_speculative_tokens_per_batch_size": "adaptive (drafting stops where it does not pay; not yet for networks on a GPU)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One flat option and the config field behind it."""

    name: str
    part: Part
    field: str
    annotation: object  # the field's type
    default: object
    help: str


@functools.cache
def options() -> Mapping[str, Option]:
    """Every flat option by name, in the order of the dataclasses' fields."""
    found: dict[str, Option] = {}
    for part, config in _PARTS.items():
        hints = get_type_hints(config)
        for item in fields(config):
            if part == "engine" and item.name in _PARTS:
                continue
            name = _RENAMED.get((part, item.name), item.name)
            assert name not in found, f"two config fields share the flat name {name!r}"
            found[name] = Option(
                name=name,
                part=part,
                field=item.name,
                annotation=hints[item.name],
                default=item.default,
                help=str(item.metadata.get("help", "")),
            )
    return found


def engine_config(values: Mapping[str, object], base: EngineConfig | None = None) -> EngineConfig:
    """Build a config from flat values.

    Args:
        values: flat option name -> value. `speculative_config` (a mapping, or JSON text) carries
            vLLM's keys. `spec` may carry the suffix drafter's shape: "suffix:path".
        base: what is not named keeps the value it has here.

    Raises:
        ConfigError: unknown names, values of the wrong type, or one thing set twice; all problems
            at once.
    """
    base = EngineConfig() if base is None else base
    changes: dict[Part, dict[str, Any]] = {"engine": {}, "cache": {}, "draft": {}}
    problems: list[str] = []
    known = {alias: name for name, aliases in ALIASES.items() for alias in aliases}
    for given, value in values.items():
        if given == "speculative_config":
            continue
        option = options().get(known.get(given, given))
        if option is None:
            problems.append(_unknown(given))
            continue
        new: dict[str, object] = {option.field: value}
        if option.name == "spec" and isinstance(value, str):
            new = dict(split_spec(value))
        elif not accepts(value, option.annotation):
            problems.append(f"{given} must be {spell(option.annotation)}, got {value!r}")
        elif isinstance(value, list):
            new[option.field] = tuple(value)
        for name, item in new.items():
            if name in changes[option.part]:
                problems.append(f"{given} is given twice, under two names; keep one")
            changes[option.part][name] = item
    if values.get("speculative_config") is not None:
        draft, faults = _speculative(values["speculative_config"])
        problems += faults
        problems += [
            f"{name} is given both by an option and in the speculative config; keep one"
            for name in draft
            if name in changes["draft"]
        ]
        changes["draft"].update(draft)
    if problems:
        msg = "invalid options: " + "; ".join(problems)
        raise ConfigError(msg)
    return replace(
        base,
        **changes["engine"],
        cache=replace(base.cache, **changes["cache"]),
        draft=replace(base.draft, **changes["draft"]),
    )


def split_spec(spec: str) -> dict[str, str]:
    """Read "suffix" or "suffix:path" as drafter fields.

    Raises:
        ConfigError: the part after the colon is no shape of that drafter.
    """
    method, colon, shape = spec.partition(":")
    if not colon:
        return {"method": method}
    shapes = get_args(options()["suffix_shape"].annotation)
    if method != "suffix" or shape not in shapes:
        forms = ", ".join(f"suffix:{s}" for s in shapes)
        msg = f"unknown drafter form {spec!r}; a drafter's name may stand alone, or as {forms}"
        raise ConfigError(msg)
    return {"method": method, "suffix_shape": shape}


def speculative_keys() -> tuple[str, ...]:
    """Every key that a speculative config may have."""
    return (*(f.name for f in fields(DraftConfig)), *_VLLM_KEYS)


def _speculative(given: object) -> tuple[dict[str, Any], list[str]]:
    """Read a speculative config; returns DraftConfig fields, and what is wrong with it."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (json.JSONDecodeError, RecursionError) as error:
            return {}, [f"the speculative config is not JSON ({error}); write it as {_EXAMPLE}"]
    if not isinstance(given, Mapping):
        return {}, [f"the speculative config must be a JSON object like {_EXAMPLE}"]
    hints = get_type_hints(DraftConfig)
    changes: dict[str, Any] = {}
    problems = []
    for key, value in given.items():
        name = _VLLM_KEYS.get(key, key)
        if key in _VLLM_WITHOUT_EQUAL:
            problems.append(f"{key} has no equal here; use {_VLLM_WITHOUT_EQUAL[key]}")
        elif name not in hints:
            problems.append(
                f"unknown key {key!r} in the speculative config; known keys: "
                + ", ".join(speculative_keys())
            )
        elif not accepts(value, hints[name]):
            problems.append(f"{key} must be {spell(hints[name])}, got {value!r}")
        elif name in changes:
            problems.append(f"{key} is given twice, under two names; keep one")
        else:
            changes[name] = tuple(value) if isinstance(value, list) else value
    # As in vLLM, one of the two n-gram bounds alone sets both.
    for one, other in (("min", "max"), ("max", "min")):
        if f"prompt_lookup_{one}" in changes and f"prompt_lookup_{other}" not in changes:
            changes[f"prompt_lookup_{other}"] = changes[f"prompt_lookup_{one}"]
    return changes, problems


_EXAMPLE = """'{"method": "ngram", "num_speculative_tokens": 4}'"""


def _unknown(name: str) -> str:
    known = [*options(), "speculative_config"]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
    return f"unknown option {name!r}; {hint}"


def accepts(value: object, annotation: object) -> bool:
    """Whether a plain value has the type that a config field states."""
    origin = get_origin(annotation)
    if origin is Literal:
        return any(type(value) is type(a) and value == a for a in get_args(annotation))
    if origin in (Union, types.UnionType):
        return any(accepts(value, a) for a in get_args(annotation))
    if origin is tuple:
        item = get_args(annotation)[0]
        return isinstance(value, list | tuple) and all(accepts(v, item) for v in value)
    if annotation is bool or annotation is types.NoneType or annotation is str:
        return isinstance(value, annotation)
    if isinstance(value, bool):
        return False
    if annotation is float:
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return annotation is int and isinstance(value, int)


def spell(annotation: object) -> str:
    """A field's type in words."""
    origin = get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(spell(a) for a in get_args(annotation))
    if origin is tuple:
        return f"a list, each {spell(get_args(annotation)[0])}"
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a finite number",
        str: "text",
        types.NoneType: "none",
    }
    return words.get(annotation, str(annotation)) if isinstance(annotation, type) else "?"
