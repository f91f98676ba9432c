"""Reasoning: the part of an answer that a model writes for itself, between `<think>` and `</think>`.

Qwen3, DeepSeek-R1 and Kimi-K2 Thinking write so. Some templates open the reasoning in the prompt, some
close it there (thinking switched off), some leave it to the model: the end of the rendered prompt says
which. White space around the marks belongs to them. A mark that begins calls of functions ends the
reasoning too, where a family's marks are tokens: models forget `</think>` there.
Not for: calls (tool_parsers).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.api.server.pieces import Content, Piece, Reasoning, merged
from paceline.api.server.tool_parsers.base import CallParser, earliest, undecided


class TokenBytes(Protocol):
    """The part of a tokenizer that counting needs."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token."""
        ...


class Thinking(enum.Enum):
    """Where the reasoning stands when the answer begins."""

    OPEN = "open"  # the prompt has opened it
    MAYBE = "maybe"  # the model may open it
    CLOSED = "closed"  # the prompt has closed it, or the model does not reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkForm:
    """How a model writes its reasoning.

    Attributes:
        opens, closes: the marks.
        also_ends: marks that end it and belong to what follows.
    """

    opens: str = "<think>"
    closes: str = "</think>"
    also_ends: tuple[str, ...] = ()

    def after(self, prompt: str) -> Thinking:
        """Where the reasoning stands after a rendered prompt."""
        end = prompt.rstrip()
        if end.endswith(self.opens):
            return Thinking.OPEN
        return Thinking.CLOSED if end.endswith(self.closes) else Thinking.MAYBE

    def within(self, message: str) -> Thinking:
        """Where the reasoning stands at the end of an assistant's message that is to be continued."""
        if not message.strip():
            return Thinking.MAYBE
        is_open = message.lstrip().startswith(self.opens) and self.closes not in message
        return Thinking.OPEN if is_open else Thinking.CLOSED


class ThinkParser:
    """Splits one answer's text into reasoning and content, wherever the text is cut.

    Args:
        form: the marks.
        thinking: where the reasoning stands when the answer begins.
    """

    def __init__(self, form: ThinkForm, thinking: Thinking) -> None:
        self._form = form
        self._thinking = thinking
        self._text = ""  # not decided yet
        self._trim = thinking is Thinking.OPEN  # white space comes next that belongs to a mark
        self._space = ""  # white space that may turn out to stand before the closing mark

    def feed(self, text: str) -> list[Piece]:
        """Take the next part of the answer; return what became certain."""
        self._text += text
        return merged(self._split(ended=False))

    def finish(self) -> list[Piece]:
        """End the answer; return the rest."""
        pieces = self._split(ended=True)
        if self._thinking is Thinking.OPEN:
            pieces.append(Reasoning(self._space))
        return merged(pieces)

    def _split(self, *, ended: bool) -> list[Piece]:
        pieces: list[Piece] = []
        if self._thinking is Thinking.MAYBE and not self._begins(ended):
            return pieces
        if self._thinking is Thinking.OPEN:
            pieces.append(Reasoning(self._reasoning(ended)))
        if self._thinking is Thinking.CLOSED:
            self._trim_front()
            pieces.append(Content(self._text))
            self._text = ""
        return pieces

    def _begins(self, ended: bool) -> bool:
        """Decide whether the answer begins with reasoning; False: more text is needed."""
        rest = self._text.lstrip()
        if rest.startswith(self._form.opens):
            self._thinking, self._trim = Thinking.OPEN, True
            self._text = rest.removeprefix(self._form.opens)
            return True
        if self._form.opens.startswith(rest) and not ended:
            return False
        self._thinking = Thinking.CLOSED
        return True

    def _reasoning(self, ended: bool) -> str:
        """Take reasoning up to its end; sees to the state where that has come."""
        self._trim_front()
        ends = (self._form.closes, *self._form.also_ends)
        found = earliest(self._text, ends)
        if found is not None:
            at, mark = found
            text = (self._space + self._text[:at]).rstrip()
            self._space = ""
            self._text = self._text[at:].removeprefix(self._form.closes)
            self._thinking, self._trim = Thinking.CLOSED, mark == self._form.closes
            return text
        held = 0 if ended else undecided(self._text, ends)
        text = self._space + self._text[: len(self._text) - held]
        self._text = self._text[len(self._text) - held :]
        body = text.rstrip()
        self._space = text[len(body) :]
        return body

    def _trim_front(self) -> None:
        if self._trim:
            self._text = self._text.lstrip()
            self._trim = not self._text


class AnswerParser:
    """Turns one answer's text into pieces: reasoning first, then content and calls.

    Args:
        think: splits off the reasoning; None: the model writes none.
        calls: finds calls in the rest; None: all of it is content.
        shows_reasoning: False: it is dropped.
    """

    def __init__(
        self,
        think: ThinkParser | None,
        calls: CallParser | None,
        *,
        shows_reasoning: bool = True,
    ) -> None:
        self._think = think
        self._calls = calls
        self._shows_reasoning = shows_reasoning

    def feed(self, text: str) -> list[Piece]:
        """Take the next part of the answer, of any length; return what became certain."""
        if self._think is None:
            if self._calls is not None:
                return self._calls.feed(text)
            return [Content(text)] if text else []
        return self._with_calls(self._think.feed(text))

    def finish(self) -> list[Piece]:
        """End the answer; return the rest."""
        pieces = [] if self._think is None else self._with_calls(self._think.finish())
        return merged([*pieces, *(self._calls.finish() if self._calls is not None else ())])

    def whole(self, text: str) -> list[Piece]:
        """The pieces of a finished answer; instead of `feed` and `finish`."""
        return merged([*self.feed(text), *self.finish()])

    def _with_calls(self, pieces: Sequence[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            match piece:
                case Content(text) if self._calls is not None:
                    found += self._calls.feed(text)
                case Reasoning() if not self._shows_reasoning:
                    continue
                case _:
                    found.append(piece)
        return merged(found)


def count_reasoning(
    token_ids: Sequence[int], tokenizer: TokenBytes, form: ThinkForm, thinking: Thinking
) -> int:
    """How many of an answer's tokens hold reasoning; the marks do not count, a shared token does.

    Exact: the tokens' bytes are laid side by side, and those between the marks belong to it.
    """
    pieces = [tokenizer.token_bytes(token_id) for token_id in token_ids]
    text = b"".join(pieces)
    start = 0
    if thinking is Thinking.MAYBE:
        opens = form.opens.encode()
        start = len(text) - len(text.lstrip())
        if not text.startswith(opens, start):
            return 0
        start += len(opens)
    elif thinking is Thinking.CLOSED:
        return 0
    ends = [text.find(mark.encode(), start) for mark in (form.closes, *form.also_ends)]
    end = min((at for at in ends if at >= 0), default=len(text))
    count = at = 0
    for piece in pieces:
        count += bool(piece) and at < end and at + len(piece) > start
        at += len(piece)
    return count
