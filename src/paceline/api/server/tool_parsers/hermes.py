"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, amid text."""

from __future__ import annotations

import enum

from paceline.api.server.tool_parsers.json_call import Outcome
from paceline.api.server.tool_parsers.json_object import JsonCallParser

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class _In(enum.Enum):
    CONTENT = enum.auto()
    CALL = enum.auto()
    AFTER = enum.auto()  # where the closing mark belongs; some models leave it out


class HermesParser(JsonCallParser):
    """See the module's docstring."""

    _state = _In.CONTENT

    def _step(self) -> bool:
        match self._state:
            case _In.CONTENT:
                return self._in_content()
            case _In.CALL:
                return self._in_call()
            case _In.AFTER:
                return self._after()

    def _in_content(self) -> bool:
        text, mark = self._take_until((OPEN,))
        self._content(text)
        if mark is None:
            return False
        self._begin()
        self._state = _In.CALL
        return True

    def _in_call(self) -> bool:
        outcome = self._read()
        assert self._call is not None, "read before"
        if outcome is Outcome.OPEN:
            return False
        if self._call.started:
            self._state = _In.AFTER
        else:
            self._content(OPEN)
            self._state = _In.CONTENT
        return True

    def _after(self) -> bool:
        if not self._skip_space():
            return False
        if self._ended and CLOSE.startswith(self._text):  # cut within the mark
            self._text = ""
        if self._next_mark((CLOSE,)) is None:
            return False
        self._state = _In.CONTENT
        return True
