"""SectionParser: calls inside a section of their own, between marks that are tokens.

Kimi-K2 and DeepSeek write so: section begin, then calls of the form begin, head, separator, arguments,
end; then section end. The arguments are whatever stands between their marks.
"""

from __future__ import annotations

import enum
from abc import abstractmethod
from typing import ClassVar

from paceline.api.server.tool_parsers.base import CallParser


class _In(enum.Enum):
    CONTENT = enum.auto()
    SECTION = enum.auto()
    HEAD = enum.auto()
    ARGUMENTS = enum.auto()


class SectionParser(CallParser):
    """Subclasses name the marks, and read a call's head.

    Attributes:
        opens, closes: what a section may begin and end with; models spell them in several ways.
        call_open, separator: around a call's head.
        call_close: what may end a call's arguments; of two that overlap the one that begins first.
    """

    opens: ClassVar[tuple[str, ...]]
    closes: ClassVar[tuple[str, ...]]
    call_open: ClassVar[str]
    separator: ClassVar[str]
    call_close: ClassVar[tuple[str, ...]]

    _state = _In.CONTENT
    _opened = ""  # the mark that began the section, while no call has
    _head = ""  # of the call being read
    _given = False  # some of the arguments were handed on
    _gap = ""  # white space that may turn out to end the arguments

    @abstractmethod
    def _name_of(self, head: str) -> tuple[str, str | None] | None:
        """The function's name and the call's id (None: it has none); None: this is no head."""

    def _step(self) -> bool:
        match self._state:
            case _In.CONTENT:
                return self._in_content()
            case _In.SECTION:
                return self._in_section()
            case _In.HEAD:
                return self._in_head()
            case _In.ARGUMENTS:
                return self._in_arguments()

    def _in_content(self) -> bool:
        text, mark = self._take_until(self.opens)
        self._content(text)
        if mark is None:
            return False
        self._opened = mark
        self._state = _In.SECTION
        return True

    def _in_section(self) -> bool:
        rest = self._text.lstrip()
        space = self._take(len(self._text) - len(rest))
        if self._opened:  # given back with the mark, should no call follow
            self._opened += space
        if not rest:
            if self._ended:
                self._refuse()
            return False
        mark = self._next_mark((self.call_open, *self.closes))
        if mark is None:
            return False
        if mark == self.call_open:
            self._head = ""
            self._state = _In.HEAD
        elif mark in self.closes:
            self._opened = ""
            self._state = _In.CONTENT
        else:
            self._refuse()
        return True

    def _in_head(self) -> bool:
        """The head up to its separator; another mark before it means that this is no call."""
        others = (self.call_open, *self.call_close, *self.closes)
        text, mark = self._take_until((self.separator, *others))
        self._head += text
        if mark is None:
            if self._ended:
                self._refuse(self.call_open + self._head)
            return False
        named = self._name_of(self._head) if mark == self.separator else None
        if named is None:
            closed = mark in self.call_close
            self._refuse(self.call_open + self._head + (mark if closed else ""))
            self._text = self._text if closed else mark + self._text
            self._state = _In.SECTION
            return True
        self._opened = ""
        self._start(*named)
        self._given, self._gap = False, ""
        self._state = _In.ARGUMENTS
        return True

    def _in_arguments(self) -> bool:
        text, mark = self._take_until((*self.call_close, self.call_open, *self.closes))
        text = self._gap + text
        if mark is None and self._ended:
            text = self._without_half_mark(text)
        if not self._given:
            text = text.lstrip()
        body = text.rstrip()
        self._gap = text[len(body) :]
        self._given |= bool(body)
        self._arguments(body)
        if mark is None and not self._ended:
            return False
        if not self._given:
            self._arguments("{}")
            self._given = True
        if mark is None:
            return False
        if mark not in self.call_close:  # the call's end was left out
            self._text = mark + self._text
        self._state = _In.SECTION
        return True

    def _without_half_mark(self, text: str) -> str:
        """The last of the arguments of an answer that ended within a call."""
        return text

    def _refuse(self, text: str = "") -> None:
        """Give back what is no call, and go on as content."""
        self._content(self._opened + text)
        self._opened = ""
        self._state = _In.CONTENT
