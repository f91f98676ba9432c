"""Settings from plain values, such as a file holds, and plain values of settings, for those who may know them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, get_origin, get_type_hints

from paceline.api.options import accepts, spell
from paceline.api.server.settings import ServerSettings
from paceline.core.errors import ConfigError


def settings_of(values: Mapping[str, object]) -> ServerSettings:
    """Settings from plain values, such as a YAML file gives.

    Args:
        values: field name -> value. One text stands for a list of one.

    Raises:
        ConfigError: unknown names, values of the wrong type or out of range; all problems at once.
    """
    hints = get_type_hints(ServerSettings)
    found: dict[str, Any] = {}
    problems = []
    for name, value in values.items():
        if name not in hints:
            problems.append(unknown(name, hints))
            continue
        several = get_origin(hints[name]) is tuple
        listed = [value] if several and isinstance(value, str) else value
        if not accepts(listed, hints[name]):
            problems.append(f"{name} must be {spell(hints[name])}, got {value!r}")
        found[name] = tuple(listed) if isinstance(listed, list) else listed
    if problems:
        msg = "invalid server settings: " + "; ".join(problems)
        raise ConfigError(msg)
    return ServerSettings(**found)


def unknown(name: str, known: Iterable[str]) -> str:
    """What is said of a name that nobody knows, with the one that was perhaps meant."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    return f"unknown option {name!r}; {hint}"


def changed(settings: ServerSettings) -> dict[str, Any]:
    """What differs from the defaults, for the log; of what nobody may know the number."""
    default = ServerSettings()
    return {
        f.name: value if f.metadata["told"] != "none" else f"({len(value)} not shown)"
        for f in fields(settings)
        if (value := getattr(settings, f.name)) != getattr(default, f.name)
    }


def public(settings: ServerSettings) -> dict[str, Any]:
    """What whoever asks may know."""
    return {
        f.name: getattr(settings, f.name) for f in fields(settings) if f.metadata["told"] == "all"
    }
