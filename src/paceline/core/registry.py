"""Registry: a list of names, each bound to `module:attribute` and imported only when asked for.

A registry line is a string, so registering adds no import edge and costs nothing at start-up.
Tests iterate over registries, which is how a new line brings its own conformance tests.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar, cast

from paceline.core.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to lazily imported objects.

    Args:
        kind: what is registered, as a noun for messages ("drafter").
        lines: name -> "package.module:attribute".
    """

    def __init__(self, kind: str, lines: Mapping[str, str]) -> None:
        self.kind = kind
        self._lines = dict(lines)

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __contains__(self, name: object) -> bool:
        return name in self._lines

    def names(self) -> tuple[str, ...]:
        """All registered names, in registration order."""
        return tuple(self._lines)

    def get(self, name: str) -> T:
        """Import and return what `name` stands for.

        Raises:
            ConfigError: the name is unknown; the message lists the names there are.
        """
        line = self._lines.get(name)
        if line is None:
            near = difflib.get_close_matches(name, self._lines, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            names = ", ".join(self._lines)
            msg = f"unknown {self.kind} {name!r}; known {self.kind}s: {names}.{hint}"
            raise ConfigError(msg)
        module, _, attr = line.partition(":")
        return cast("T", getattr(importlib.import_module(module), attr))
