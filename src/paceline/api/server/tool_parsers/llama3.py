"""Llama 3.1 and later: `<|python_tag|>{"name": ..., "parameters": {...}}`, or the bare object.

A bare object counts only where the answer begins with it (or where a call has just ended) and if it
names a function that the model was told of: other JSON is an answer. Several calls are separated by
semicolons or white space. Python code after the tag (built-in tools) is content, tag included.
"""

from __future__ import annotations

import enum

from paceline.api.server.tool_parsers.json_call import Outcome
from paceline.api.server.tool_parsers.json_object import JsonCallParser

TAG = "<|python_tag|>"


class _In(enum.Enum):
    FRONT = enum.auto()  # a bare object may begin here
    CONTENT = enum.auto()
    CALL = enum.auto()


class Llama3Parser(JsonCallParser):
    """See the module's docstring."""

    _state = _In.FRONT
    _front = ""  # what stood before a bare object: white space, a semicolon
    _tagged = False

    def _step(self) -> bool:
        match self._state:
            case _In.FRONT:
                return self._in_front()
            case _In.CONTENT:
                return self._in_content()
            case _In.CALL:
                return self._in_call()

    def _in_front(self) -> bool:
        skipped = " \t\r\n;" if self._index >= 0 else " \t\r\n"
        rest = self._text.lstrip(skipped)
        self._front += self._take(len(self._text) - len(rest))
        if not rest and (not self._ended or self._index >= 0):
            return False
        if rest.startswith("{"):
            self._tagged = False
            self._begin(self._names.__contains__)
            self._state = _In.CALL
            return True
        mark = self._next_mark((TAG,))
        if mark is None:
            return False
        if mark:
            self._open_tag()
        else:
            self._content(self._front)
            self._front = ""
            self._state = _In.CONTENT
        return True

    def _in_content(self) -> bool:
        text, mark = self._take_until((TAG,))
        self._content(text)
        if mark is None:
            return False
        self._open_tag()
        return True

    def _open_tag(self) -> None:
        self._tagged = True
        self._begin()
        self._state = _In.CALL

    def _in_call(self) -> bool:
        outcome = self._read()
        assert self._call is not None, "read before"
        if outcome is Outcome.OPEN:
            if self._call.started:
                self._front = ""
            return False
        if self._call.started:
            self._front = ""
            self._state = _In.FRONT
            return True
        self._content(self._front + (TAG if self._tagged else ""))
        self._front = ""
        self._state = _In.CONTENT
        return True
