"""CallParser: finds calls of functions in an answer's text while it grows.

A parser holds back what it cannot decide yet, so its pieces, joined, never depend on where the text was
cut. What looks like a call and is none is content: nothing that the model wrote is lost, save white
space around calls. Once a call has begun its arguments are handed on as they are, even where they turn
out not to be JSON: a stream takes nothing back, and a whole answer says the same as a stream.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from paceline.api.server.pieces import CallArguments, CallStart, Content, Piece, merged


def new_call_id() -> str:
    """An id for a call whose text carries none."""
    return f"call_{secrets.token_hex(12)}"


def earliest(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of the marks begins in a text, and which it is."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found, key=lambda pair: pair[0]) if found else None


def undecided(text: str, marks: Sequence[str]) -> int:
    """How many characters at a text's end could be the beginning of a mark."""
    most = min(len(text), max(len(mark) for mark in marks) - 1)
    for length in range(most, 0, -1):
        tail = text[-length:]
        if any(mark.startswith(tail) for mark in marks):
            return length
    return 0


class CallParser(ABC):
    """One answer's parser. Subclasses implement `_step`, which moves from state to state.

    Args:
        names: the functions that the model was told of.
        new_id: makes the ids of calls.
    """

    def __init__(
        self, names: frozenset[str] = frozenset(), new_id: Callable[[], str] = new_call_id
    ) -> None:
        self._names = names
        self._new_id = new_id
        self._text = ""  # not decided yet
        self._ended = False  # no more text will come
        self._index = -1  # of the latest call
        self._pieces: list[Piece] = []
        self._space = ""  # white space that may turn out to stand before a call
        self._after_call = False  # nothing but white space since a call

    def feed(self, text: str) -> list[Piece]:
        """Take the next part of the answer, of any length; return what became certain."""
        assert not self._ended, "feed() after finish(): the answer has ended"
        self._text += text
        return self._run()

    def finish(self) -> list[Piece]:
        """End the answer; return the rest."""
        self._ended = True
        pieces = self._run()
        if self._space:
            pieces = merged([*pieces, Content(self._space)])
            self._space = ""
        return pieces

    @abstractmethod
    def _step(self) -> bool:
        """Take what is certain from the front of `_text`; False: more text is needed."""

    def _run(self) -> list[Piece]:
        while self._step():
            pass
        pieces, self._pieces = merged(self._pieces), []
        return pieces

    # -- what subclasses say and take -------------------------------------------------------

    def _content(self, text: str) -> None:
        """White space is held until something follows that is no call."""
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        body = text.rstrip()
        self._space = text[len(body) :]
        self._pieces.append(Content(body))

    def _start(self, name: str, call_id: str | None = None) -> None:
        self._space = ""
        self._after_call = True
        self._index += 1
        self._pieces.append(CallStart(self._index, call_id or self._new_id(), name))

    def _arguments(self, text: str) -> None:
        self._pieces.append(CallArguments(self._index, text))

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken

    def _take_until(self, marks: Sequence[str]) -> tuple[str, str | None]:
        """Take the text before the first mark, and the mark; None: it has not come (yet)."""
        found = earliest(self._text, marks)
        if found is not None:
            before = self._take(found[0])
            return before, self._take(len(found[1]))
        held = 0 if self._ended else undecided(self._text, marks)
        return self._take(len(self._text) - held), None

    def _skip_space(self) -> bool:
        """Drop white space; False: that was all there is."""
        self._text = self._text.lstrip()
        return bool(self._text)

    def _next_mark(self, marks: Sequence[str]) -> str | None:
        """Take the mark that the text begins with; "": it begins with none; None: not certain."""
        for mark in marks:
            if self._text.startswith(mark):
                return self._take(len(mark))
        if not self._ended and any(mark.startswith(self._text) for mark in marks):
            return None
        return ""
