"""JsonCall: reads `{"name": ..., "arguments": {...}}` character by character.

Two families write their calls so (Hermes, Llama 3). Keys may come in any order and others are skipped;
the arguments are told while they grow, as soon as the name is known. Arguments that the model wrote as
a JSON string are unwrapped.
Not for: whether the arguments fit a schema.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable

_NAME_KEYS = frozenset({"name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_SPACE = " \t\r\n"


class Outcome(enum.Enum):
    """How reading stands."""

    OPEN = "open"  # more text is needed
    DONE = "done"  # the object is complete
    BROKEN = "broken"  # the character offered does not belong to a call; it was not taken


class _At(enum.Enum):
    START = enum.auto()
    KEY = enum.auto()  # a key, or the object's end
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_VALUE = enum.auto()
    COMMA = enum.auto()  # a comma, or the object's end


class JsonCall:
    """One call on its way.

    Args:
        accepts: whether a name is a function's.

    Attributes:
        name: the function; None until it is known. The call has begun once `started`.
        started: the name and the first of the arguments were seen: the call stands.
    """

    def __init__(self, accepts: Callable[[str], bool] = lambda _: True) -> None:
        self.name: str | None = None
        self.started = False
        self._accepts = accepts
        self._at = _At.START
        self._key = ""
        self._value: list[str] = []  # of the value being read
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._is_arguments = False  # the value being read is
        self._seen_arguments = False
        self._early: str | None = None  # arguments that came before the name
        self._ready: list[str] = []  # arguments not yet taken

    def take(self) -> str:
        """The text of the arguments that came since the last call."""
        ready = "".join(self._ready)
        self._ready.clear()
        return ready

    def push(self, char: str) -> Outcome:
        """Take one character."""
        match self._at:
            case _At.IN_VALUE:
                return self._in_value(char)
            case _At.IN_KEY:
                return self._in_key(char)
        if char in _SPACE:
            return Outcome.OPEN
        match self._at, char:
            case _At.START, "{":
                self._at = _At.KEY
            case _At.KEY, '"':
                self._at, self._key = _At.IN_KEY, char
            case ((_At.KEY | _At.COMMA), "}"):
                return self._close()
            case _At.COLON, ":":
                self._at = _At.VALUE
            case _At.COMMA, ",":
                self._at = _At.KEY
            case _At.VALUE, _ if char not in "}],:<":
                return self._open_value(char)
            case _:
                return Outcome.BROKEN
        return Outcome.OPEN

    def finish(self) -> None:
        """No more text comes: arguments that were being unwrapped are handed on as they are."""
        if self._at is _At.IN_VALUE and self.started and not self._streams:
            self._ready.append("".join(self._value))

    @property
    def _streams(self) -> bool:
        """Whether the value being read is handed on as it grows."""
        return self.started and self._is_arguments and self._value[0] not in '"n'

    def _in_key(self, char: str) -> Outcome:
        self._key += char
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            key = _decoded(self._key)
            if key is None:
                return Outcome.BROKEN
            self._key, self._at = key, _At.COLON
        return Outcome.OPEN

    def _open_value(self, char: str) -> Outcome:
        self._at, self._value, self._depth = _At.IN_VALUE, [], 0
        self._in_string = self._escaped = False
        self._is_arguments = self._key in _ARGUMENT_KEYS and not self._seen_arguments
        self._seen_arguments |= self._is_arguments
        self.started |= self._is_arguments and self.name is not None
        return self._in_value(char)

    def _in_value(self, char: str) -> Outcome:
        """Strings and brackets are followed, the rest is taken as it comes."""
        value = self._value
        if self._in_string:
            self._keep(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                if not self._depth:
                    return self._close_value()
            return Outcome.OPEN
        if char == "<":  # no JSON: the mark that ends the call
            return Outcome.BROKEN
        if not self._depth and value and (char in _SPACE or char in ",}]"):
            outcome = self._close_value()  # a number, true, false or null has ended
            return self.push(char) if outcome is Outcome.OPEN else outcome
        self._keep(char)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth <= 0:
                return self._close_value()
        return Outcome.OPEN

    def _keep(self, char: str) -> None:
        self._value.append(char)
        if self._streams:
            self._ready.append(char)

    def _close_value(self) -> Outcome:
        text = "".join(self._value)
        streamed = self._streams
        self._at = _At.COMMA
        if self._key in _NAME_KEYS and self.name is None:
            name = _decoded(text)
            if not name or not self._accepts(name):
                return Outcome.BROKEN
            self.name = name
            if self._early is not None:
                self.started = True
                self._ready.append(self._early)
        elif self._is_arguments and not streamed:
            text = _unwrapped(text)
            if self.name is None:
                self._early = text
            else:
                self._ready.append(text)
        return Outcome.OPEN

    def _close(self) -> Outcome:
        if self.name is None:
            return Outcome.BROKEN
        if not self.started:  # a function without arguments
            self.started = True
            self._ready.append("{}")
        return Outcome.DONE


def _decoded(text: str) -> str | None:
    """The text of a JSON string; None if it is none."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _unwrapped(text: str) -> str:
    if text == "null":
        return "{}"
    inner = _decoded(text) if text.startswith('"') else None
    return text if inner is None else inner
