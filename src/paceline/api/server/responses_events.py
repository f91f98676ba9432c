"""ResponseEvents: an answer's pieces become items of a response, and the typed events that tell of them.

    response.created, response.in_progress
    response.output_item.added      an item begins: reasoning, a message or a call
    response.content_part.added     its text begins (not for calls)
    ...delta                        of reasoning_text, output_text or function_call_arguments
    ...done, response.content_part.done, response.output_item.done
    response.completed, .incomplete or .failed, with the whole response

Every event carries the next `sequence_number`. A whole answer is made by the same steps, its events unused.
Not for: the request (responses.py), what is kept of an answer (response_store.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from paceline.api.server.errors import ApiError
from paceline.api.server.head import check_result
from paceline.api.server.logprobs import PlacedTokens
from paceline.api.server.pieces import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
)
from paceline.api.server.responses import response_of

if TYPE_CHECKING:
    from paceline.api.results import Chunk, Result
    from paceline.api.server.responses import ResponseCall

Event: TypeAlias = tuple[str, dict[str, Any]]
Kind = Literal["reasoning", "message", "function_call"]
CANCELLED = "cancelled"
# Kind of item -> the kind of its text, as events name it.
_TEXTS: dict[Kind, str] = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
}
_PREFIXES: dict[Kind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


@dataclass(slots=True)
class _Open:
    """The item that grows."""

    kind: Kind
    id: str
    call_id: str = ""
    name: str = ""
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def item(self, status: str) -> dict[str, Any]:
        """The item as it is now; one that has just begun has no parts yet."""
        found: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        begun = status != "in_progress"
        match self.kind:
            case "reasoning":
                return {**found, "summary": [], "content": [self.part()] if begun else []}
            case "message":
                parts = [self.part()] if begun else []
                return {**found, "role": "assistant", "content": parts}
            case "function_call":
                arguments = "".join(self.text)
                return {**found, "call_id": self.call_id, "name": self.name, "arguments": arguments}

    def part(self) -> dict[str, Any]:
        """Its text as a part."""
        text = "".join(self.text)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": list(self.logprobs),
        }


class ResponseEvents:
    """One answer on its way.

    Attributes:
        output: the items that are whole.
        response: the whole response once the last event was made; None before.
    """

    def __init__(self, call: ResponseCall) -> None:
        self.output: list[dict[str, Any]] = []
        self.response: dict[str, Any] | None = None
        self._call = call
        self._parser = call.call.plan.parser(call.call.prompt)
        self._open: _Open | None = None
        self._tokens = PlacedTokens(call.call.names)
        self._events: list[Event] = []
        self._sequence = 0

    def start(self) -> list[Event]:
        """The first events."""
        for name in ("response.created", "response.in_progress"):
            self._tell(name, response=response_of(self._call, (), "in_progress"))
        return self._told()

    def take(self, chunk: Chunk, *, is_cancelled: bool = False) -> list[Event]:
        """The events for one chunk of the engine; the last chunk ends the response.

        An answer that the engine ended before its time makes a failed response.

        Args:
            chunk: of the answer.
            is_cancelled: its client called it off, so an early end is the right one.
        """
        if self._call.wants_logprobs:
            self._tokens.add(chunk.logprobs or ())
        self._add(self._parser.feed(chunk.text))
        if chunk.result is not None:
            self._end(chunk.result, is_cancelled=is_cancelled)
        return self._told()

    def whole(self, result: Result, *, is_cancelled: bool = False) -> dict[str, Any]:
        """The response of a finished answer; instead of `start` and `take`.

        Raises:
            ApiError: the engine ended the answer before its time.
        """
        if not is_cancelled:
            check_result(result)
        if self._call.wants_logprobs:
            self._tokens.add(result.logprobs or ())
        self._add(self._parser.feed(result.text))
        self._end(result, is_cancelled=is_cancelled)
        assert self.response is not None, "it has ended"
        return self.response

    def fail(self, error: ApiError) -> list[Event]:
        """The events of a response that comes to nothing more."""
        if self.response is None:
            self._close("incomplete")
            self._finish("failed", error=error)
        return self._told()

    # -- items ----------------------------------------------------------------------------------

    def _end(self, result: Result, *, is_cancelled: bool) -> None:
        if is_cancelled and result.finish_reason == "abort":
            self._add(self._parser.finish())
            self._close("incomplete")
            self._finish(CANCELLED, result=result)
            return
        try:
            check_result(result)
        except ApiError as error:
            self._close("incomplete")
            self._finish("failed", result=result, error=error)
            return
        self._add(self._parser.finish())
        if self._open is None and not self.output:
            self._begin(_Open("message", _new_id("message")))
        status = "incomplete" if result.finish_reason == "length" else "completed"
        self._close(status)
        self._finish(status, result=result)

    def _add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    self._grow("reasoning", text)
                case Content(text):
                    self._grow("message", text)
                case CallStart(id=call_id, name=name):
                    self._begin(
                        _Open("function_call", _new_id("function_call"), call_id=call_id, name=name)
                    )
                case CallArguments(_, text):
                    self._grow("function_call", text)

    def _grow(self, kind: Kind, text: str) -> None:
        one = self._open
        if one is None or one.kind != kind:
            one = self._begin(_Open(kind, _new_id(kind)))
        one.text.append(text)
        found = self._tokens.take(text)  # those of reasoning and calls are not told
        more: dict[str, Any] = {"delta": text}
        if kind == "message":
            one.logprobs += found
            more |= {"content_index": 0, "logprobs": found}
        elif kind == "reasoning":
            more["content_index"] = 0
        self._tell_item(f"response.{_TEXTS[kind]}.delta", **more)

    def _begin(self, one: _Open) -> _Open:
        self._close("completed")
        self._open = one
        self._tell(
            "response.output_item.added",
            output_index=len(self.output),
            item=one.item("in_progress"),
        )
        if one.kind != "function_call":
            self._tell_item("response.content_part.added", content_index=0, part=one.part())
        return one

    def _close(self, status: str) -> None:
        """End the item that grows."""
        one = self._open
        if one is None:
            return
        text = "".join(one.text)
        done = f"response.{_TEXTS[one.kind]}.done"
        match one.kind:
            case "function_call":
                self._tell_item(done, name=one.name, arguments=text)
            case "reasoning":
                self._tell_item(done, content_index=0, text=text)
            case "message":
                self._tell_item(done, content_index=0, text=text, logprobs=list(one.logprobs))
        if one.kind != "function_call":
            self._tell_item("response.content_part.done", content_index=0, part=one.part())
        item = one.item(status)
        self._tell("response.output_item.done", output_index=len(self.output), item=item)
        self.output.append(item)
        self._open = None

    # -- events ---------------------------------------------------------------------------------

    def _finish(
        self, status: str, *, result: Result | None = None, error: ApiError | None = None
    ) -> None:
        self.response = response_of(self._call, self.output, status, result=result, error=error)
        name = "incomplete" if status == CANCELLED else status
        self._tell(f"response.{name}", response=self.response)

    def _tell_item(self, name: str, /, **fields: Any) -> None:
        assert self._open is not None, "an item is open"
        self._tell(name, item_id=self._open.id, output_index=len(self.output), **fields)

    def _tell(self, name: str, /, **fields: Any) -> None:
        event = {"type": name, "sequence_number": self._sequence, **fields}
        self._events.append((name, event))
        self._sequence += 1

    def _told(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _new_id(kind: Kind) -> str:
    return f"{_PREFIXES[kind]}_{secrets.token_hex(24)}"
