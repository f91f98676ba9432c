"""Everything that `paceline serve` can be told, from three places: flags, environment, YAML file.

A flag goes before the environment variable PACELINE_SERVE_<FLAG>, which goes before the file. All three
know the same names: fields of `ServerSettings` and the engine's flat options.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from cyclopts import Group

from paceline.api.options import ALIASES, engine_config, options
from paceline.api.server.settings import ServerSettings
from paceline.api.server.settings_values import settings_of, unknown
from paceline.cli.flags import (
    ENGINE_SEED,
    Flags,
    config_flag,
    dashed,
    flag,
    option_flag,
)
from paceline.core import environment
from paceline.core.config import EngineConfig
from paceline.core.errors import ConfigError

# Shown beside our own names: vLLM's.
_VLLM: Mapping[str, tuple[str, ...]] = {
    "page_size": ("--block-size",),
    "prefix_cache": ("--enable-prefix-caching",),
    "seed": ("--seed",),
    "max_queued_requests": ("--max-num-queued-reqs",),
    "max_queued_tokens": ("--max-num-queued-tokens",),
}
# Understood, not shown: SGLang's names and vLLM's longer ones, where the meaning is the same.
_HIDDEN: Mapping[str, tuple[str, ...]] = {
    "model": ("model-path",),
    "max_len": ("context-length",),
    "max_rows": ("max-running-requests",),
    "chunk_size": ("chunked-prefill-size",),
    "seed": ("random-seed",),
    "spec_model": ("speculative-draft-model-path", "speculative-draft-model"),
    "eagle_topk": ("speculative-eagle-topk",),
    "eagle_num_steps": ("speculative-num-steps",),
    "max_headers": ("h11-max-header-count",),
    "max_header_bytes": ("h11-max-incomplete-event-size",),
}
# Flag -> the option that it switches off.
_OFF = {"disable-radix-cache": "prefix_cache"}
_CONFIG = "config"
_CONFIG_HELP = "YAML file with these flags as keys, such as 'max-len: 4096'; flags go before it"
_GROUPS = tuple(dict.fromkeys(str(f.metadata["group"]) for f in fields(ServerSettings)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A server to be started."""

    settings: ServerSettings
    config: EngineConfig


def serving_flags() -> Flags:
    """The flags behind a parameter of type `Serving`."""
    groups = {name: Group(name, sort_key=i + 1) for i, name in enumerate(_GROUPS)}
    hints = get_type_hints(ServerSettings)
    parameters = [
        flag(
            _CONFIG,
            Path,
            _CONFIG_HELP,
            Group("Configuration", sort_key=0),
            default=None,
            env=environment.serve_variable(_CONFIG),
        )
    ]
    for item in fields(ServerSettings):
        several = get_origin(hints[item.name]) is tuple
        parameters.append(
            flag(
                item.name,
                list[str] if several else hints[item.name],
                item.metadata["help"],
                groups[item.metadata["group"]],
                names=[dashed(item.name), *_VLLM.get(item.name, ())],
                default=item.default,
                env=environment.serve_variable(item.name),
            )
        )
    for option in options().values():
        env = environment.serve_variable(option.name)
        parameters.append(option_flag(option, *_VLLM.get(option.name, ()), env=env))
    parameters.append(config_flag(environment.serve_variable("speculative_config")))
    parameters += _hidden_flags(parameters)
    return Flags(parameters, _serving)


def _hidden_flags(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    types = {p.name: p.annotation.__origin__ for p in parameters}
    types["seed"] = types[ENGINE_SEED]
    group = Group("Hidden", show=False)
    found = [
        flag(_slot(name), types[target], "", group, default=None, names=[f"--{name}"], hidden=True)
        for target, names in _HIDDEN.items()
        for name in names
    ]
    found += [
        flag(_slot(name), bool, "", group, default=None, names=[f"--{name}"], hidden=True)
        for name in _OFF
    ]
    return found


def _slot(name: str) -> str:
    return name.replace("-", "_")


def _serving(given: dict[str, Any]) -> Serving:
    check_environment(environment.serve_variables())
    path = given.pop(_CONFIG, None)
    values = _canonical(given, "on the command line or in the environment")
    if path is not None:
        stated = _canonical(read_file(path), f"in {path}")
        if _CONFIG in stated:
            msg = (
                f"the configuration {path} names a configuration of its own; one file is read; put its "
                "lines into this one"
            )
            raise ConfigError(msg)
        values = {**stated, **values}
    return serving_of(values)


def serving_of(values: Mapping[str, object]) -> Serving:
    """A server from plain values under our own names.

    Raises:
        ConfigError: unknown names, wrong values.
    """
    own = {f.name for f in fields(ServerSettings)}
    engine = {*options(), "speculative_config"}
    strange = [unknown(name, _known()) for name in values if name not in own | engine]
    if strange:
        msg = "invalid configuration: " + "; ".join(strange)
        raise ConfigError(msg)
    return Serving(
        settings=settings_of({k: v for k, v in values.items() if k in own}),
        config=engine_config({k: v for k, v in values.items() if k in engine}),
    )


def _canonical(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values under our own names, whatever name each was given by."""
    targets = {alias: name for name, aliases in ALIASES.items() for alias in aliases}
    for known in (_VLLM, _HIDDEN):
        targets |= {
            _slot(alias.removeprefix("--")): name
            for name, aliases in known.items()
            for alias in aliases
        }
    targets[ENGINE_SEED] = "seed"
    switches = {_slot(alias): name for alias, name in _OFF.items()}
    found: dict[str, Any] = {}
    for given, value in values.items():
        name = _slot(given)
        if name in switches:
            name, value = switches[name], not value  # noqa: PLW2901
        name = targets.get(name, name)
        if name in found:
            msg = f"{dashed(name)} is given twice {where}, under two names; keep one"
            raise ConfigError(msg)
        found[name] = value
    return found


def read_file(path: Path) -> dict[str, Any]:
    """A YAML file's keys and values.

    Raises:
        ConfigError: it cannot be read, is no mapping, or has a key twice.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        text = path.read_text(encoding="utf-8")
        found = yaml.safe_load(text)
        twice = _twice(yaml.compose(text, Loader=yaml.SafeLoader))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        msg = (
            f"the configuration {path} cannot be read ({error}); give a YAML file of 'flag: value'"
        )
        raise ConfigError(msg) from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        msg = f"the configuration {path} is no mapping; write lines such as 'port: 8000'"
        raise ConfigError(msg)
    strange = [key for key in found if not isinstance(key, str)]
    if strange:
        msg = (
            f"the configuration {path} has the key {strange[0]!r}, which is no name of a flag; write "
            "lines such as 'port: 8000'"
        )
        raise ConfigError(msg)
    if twice is not None:
        msg = f"the configuration {path} has {twice!r} twice; one value is possible; keep one of the lines"
        raise ConfigError(msg)
    return found


def _twice(root: Any) -> str | None:
    """A key that a mapping of a YAML document has twice: of two, the reader would silently take the last."""
    left, seen = [root], set()
    while left:
        node = left.pop()
        if id(node) in seen or not isinstance(getattr(node, "value", None), list):
            continue
        seen.add(id(node))
        pairs = [item for item in node.value if isinstance(item, tuple)]
        keys = [key.value for key, _ in pairs if isinstance(key.value, str)]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                return str(key)
        left += [value for _, value in pairs] or node.value
    return None


def check_environment(names: Iterable[str]) -> None:
    """Refuse variables of ours that stand for nothing.

    Raises:
        ConfigError: there is one.
    """
    known = {environment.serve_variable(name): name for name in _known()}
    strange = [_strange(name) for name in names if name not in known]
    if strange:
        msg = "invalid environment: " + "; ".join(strange)
        raise ConfigError(msg)


def _strange(variable: str) -> str:
    """What is said of a variable that nobody knows; the part that all have in common says nothing."""
    own = variable.removeprefix(environment.serve_variable("")).lower()
    near = difflib.get_close_matches(own, _known(), n=1)
    hint = (
        f"did you mean {environment.serve_variable(near[0])!r}?"
        if near
        else "the flags of 'paceline serve --help' are possible; unset it"
    )
    return f"unknown variable {variable!r}; {hint}"


def _known() -> list[str]:
    return [*(f.name for f in fields(ServerSettings)), *options(), "speculative_config", _CONFIG]
