"""Plan: how a conversation is put to the model and how its answer is read; the seam to tools and reasoning.

tools.py makes plans that know functions and marks of reasoning. `PLAIN` knows neither: an answer's
text is content, and a request that brings functions is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from paceline.api.server.errors import bad
from paceline.api.server.pieces import Content, Piece
from paceline.api.server.structured import constraint_of

if TYPE_CHECKING:
    from paceline.api.chat_template import Message
    from paceline.api.server.context import Compiler
    from paceline.api.server.protocol_chat import ChatRequest
    from paceline.core.request import Constraint


class Parser(Protocol):
    """Reads one answer's text; what comes out does not depend on where the text is cut."""

    def feed(self, text: str) -> list[Piece]:
        """Take the next part of the answer; return what became certain."""
        ...

    def finish(self) -> list[Piece]:
        """End the answer; return the rest."""
        ...


class Plan(Protocol):
    """What one request's tools and reasoning ask for.

    Attributes:
        messages: what the template renders.
        variables: further variables of the template.
        constraint: what answers must be like; None: anything.
        shows_special: special tokens are part of the text that is parsed.
    """

    @property
    def messages(self) -> Sequence[Message]: ...  # noqa: D102 (see the class)
    @property
    def variables(self) -> Mapping[str, object]: ...  # noqa: D102
    @property
    def constraint(self) -> Constraint | None: ...  # noqa: D102
    @property
    def shows_special(self) -> bool: ...  # noqa: D102

    def parser(self, prompt: str) -> Parser:
        """A fresh parser for an answer to a rendered prompt."""
        ...

    def reasoning_tokens(self, prompt: str, token_ids: Sequence[int]) -> int | None:
        """How many of an answer's tokens are reasoning; None: the model marks none."""
        ...


class Planner(Protocol):
    """Makes plans for the model that is served."""

    def plan(self, body: ChatRequest, compiler: Compiler | None) -> Plan:
        """The plan of a request.

        Raises:
            ApiError: 400; its tools cannot be served.
        """
        ...


class _Text:
    """All text is content."""

    def feed(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPlan:
    """Without tools and reasoning."""

    messages: Sequence[Message]
    constraint: Constraint | None
    variables: Mapping[str, object] = field(default_factory=dict)
    shows_special: bool = False

    def parser(self, prompt: str) -> Parser:  # noqa: ARG002 (others look at it)
        """A parser that changes nothing."""
        return _Text()

    def reasoning_tokens(self, prompt: str, token_ids: Sequence[int]) -> int | None:  # noqa: ARG002
        """None is marked."""
        return None


class PlainPlanner:
    """Plans for a model whose answers are read as they are."""

    def plan(self, body: ChatRequest, compiler: Compiler | None) -> PlainPlan:
        """The plan of a request that brings no tools."""
        if body.tools:
            msg = "tools: this server was started without them; leave them out"
            raise bad(msg, "tools")
        return PlainPlan(messages=body.messages, constraint=constraint_of(body, compiler))


PLAIN = PlainPlanner()
