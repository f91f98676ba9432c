"""Pieces: what an answer's text turns out to be, bit by bit: content, reasoning, calls of functions.

Parsers make them (tool_parsers, reasoning.py); the wire formats are built from them here (chat) and in
responses_events.py. Joined, the pieces of one answer are the same wherever its text was cut.
Not for: finding them in text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a function begins; `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Piece: TypeAlias = Content | Reasoning | CallStart | CallArguments


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces with neighbours of one kind joined, and without empty ones."""
    found: list[Piece] = []
    for piece in pieces:
        match found[-1] if found else None, piece:
            case _, Content("") | Reasoning("") | CallArguments(_, ""):
                continue
            case Content(before), Content(text):
                found[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                found[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                found[-1] = CallArguments(index, before + text)
            case _:
                found.append(piece)
    return found


def has_calls(pieces: Iterable[Piece]) -> bool:
    """Whether a call begins among these."""
    return any(isinstance(piece, CallStart) for piece in pieces)


def chat_delta(pieces: Iterable[Piece]) -> dict[str, Any]:
    """`choices[].delta` of a chat chunk, without a role; empty where there is nothing to tell.

    One entry per call: its beginning and the arguments that came with it are told together.
    """
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        match piece:
            case Content(text):
                if text:
                    delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                if text:
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            case CallStart(index, id=call_id, name=name):
                function = {"name": name, "arguments": ""}
                calls[index] = {
                    "index": index,
                    "id": call_id,
                    "type": "function",
                    "function": function,
                }
            case CallArguments(index, text):
                entry = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                entry["function"]["arguments"] += text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def chat_message(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The whole assistant message of a chat answer; `content` is None where only calls were made."""
    delta = chat_delta(pieces)
    calls: Sequence[dict[str, Any]] = delta.get("tool_calls", ())
    message: dict[str, Any] = {"role": "assistant", "content": delta.get("content")}
    if not calls and message["content"] is None:
        message["content"] = ""
    if "reasoning_content" in delta:
        message["reasoning_content"] = delta["reasoning_content"]
    if calls:
        message["tool_calls"] = [
            {name: value for name, value in call.items() if name != "index"} for call in calls
        ]
    return message
