"""Server-sent events from bytes, wherever packets cut them (WHATWG HTML, section 9.2).

Lines end with LF, CRLF or CR; lines that begin with a colon are comments (servers send them to keep
idle streams open); several data lines make one text; a character may lie in two packets.
"""

from __future__ import annotations

from dataclasses import dataclass

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event: its name ("" if it has none) and its data."""

    name: str
    data: str


class EventDecoder:
    """Takes bytes, gives events."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of a line that has not ended
        self._after_cr = False  # an LF that comes next belongs to the line end before
        self._first = True
        self._name = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[ServerEvent]:
        """Take what arrived; return the events that it completes."""
        if self._after_cr and data:
            data = data.removeprefix(b"\n")
            self._after_cr = False
        if b"\n" not in data and b"\r" not in data:
            self._parts.append(data)
            return []
        lines = b"".join((*self._parts, data)).splitlines(keepends=True)
        self._parts.clear()
        self._after_cr = lines[-1].endswith(b"\r")
        if not lines[-1].endswith((b"\n", b"\r")):
            self._parts.append(lines.pop())
        events = (self._take(line.rstrip(b"\r\n")) for line in lines)
        return [event for event in events if event is not None]

    def finish(self) -> list[ServerEvent]:
        """End of the stream: the event that it left without a blank line, if any."""
        rest = b"".join(self._parts)
        self._parts.clear()
        found = [self._take(rest), self._take(b"")] if rest else [self._take(b"")]
        return [event for event in found if event is not None]

    def _take(self, line: bytes) -> ServerEvent | None:
        if self._first:
            line = line.removeprefix(_BOM)
            self._first = False
        if not line:
            name, parts = self._name, self._data
            self._name, self._data = "", []
            return ServerEvent(name, "\n".join(parts)) if parts else None
        name_b, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode("utf-8", errors="replace")
        if name_b == b"data":
            self._data.append(text)
        elif name_b == b"event":
            self._name = text
        return None  # comments, "id", "retry" and unknown fields mean nothing here
