"""Kimi-K2: a section of calls, each with an id of the form `functions.name:7`, which is the call's id."""

from __future__ import annotations

from typing import ClassVar

from paceline.api.server.tool_parsers.sections import SectionParser

OPEN = "<|tool_calls_section_begin|>"
CLOSE = "<|tool_calls_section_end|>"
CALL_OPEN = "<|tool_call_begin|>"
SEPARATOR = "<|tool_call_argument_begin|>"
CALL_CLOSE = "<|tool_call_end|>"


class KimiK2Parser(SectionParser):
    """See the module's docstring."""

    opens: ClassVar = (OPEN, "<|tool_call_section_begin|>")
    closes: ClassVar = (CLOSE, "<|tool_call_section_end|>")
    call_open: ClassVar = CALL_OPEN
    separator: ClassVar = SEPARATOR
    call_close: ClassVar = (CALL_CLOSE,)

    def _name_of(self, head: str) -> tuple[str, str | None] | None:
        """The history must show the id as the model wrote it; one of another form is replaced."""
        head = head.strip()
        name, colon, count = head.rpartition(":")
        has_id = bool(colon) and count.isdecimal()
        name = (name if has_id else head).removeprefix("functions.")
        if not name:
            return None
        return name, head if has_id else None
