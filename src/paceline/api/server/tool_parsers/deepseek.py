"""DeepSeek V3, R1 and V3.1: a section of calls.

V3 and R1 write `function`, separator, name and a fenced block of JSON; V3.1 writes the name, separator
and the JSON itself.
"""

from __future__ import annotations

from typing import ClassVar

from paceline.api.server.tool_parsers.sections import SectionParser


def _mark(name: str) -> str:
    """DeepSeek's tokens: a full-width bar, and SentencePiece's visible space for spaces."""
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


OPEN = _mark("tool calls begin")
CLOSE = _mark("tool calls end")
CALL_OPEN = _mark("tool call begin")
SEPARATOR = _mark("tool sep")
CALL_CLOSE = _mark("tool call end")
FENCE = "```json"
_FENCE_END = "```"


class DeepSeekV31Parser(SectionParser):
    """Name, separator, JSON."""

    opens: ClassVar = (OPEN,)
    closes: ClassVar = (CLOSE,)
    call_open: ClassVar = CALL_OPEN
    separator: ClassVar = SEPARATOR
    call_close: ClassVar = (CALL_CLOSE,)

    def _name_of(self, head: str) -> tuple[str, str | None] | None:
        name = head.strip()
        return (name, None) if name else None


class DeepSeekV3Parser(SectionParser):
    """`function`, separator, name, fenced JSON: the head goes up to the fence."""

    opens: ClassVar = (OPEN,)
    closes: ClassVar = (CLOSE,)
    call_open: ClassVar = CALL_OPEN
    separator: ClassVar = FENCE
    call_close: ClassVar = (f"\n{_FENCE_END}{CALL_CLOSE}", f"{_FENCE_END}{CALL_CLOSE}", CALL_CLOSE)

    def _name_of(self, head: str) -> tuple[str, str | None] | None:
        kind, mark, name = head.partition(SEPARATOR)
        name = name.strip()
        if not mark or not name or kind.strip() != "function":
            return None
        return name, None

    def _without_half_mark(self, text: str) -> str:
        return text.rstrip().rstrip("`")
