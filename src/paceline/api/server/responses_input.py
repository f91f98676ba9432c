"""Items of a response's input, and of earlier ones, become the messages of a conversation.

A turn of the model is several items there (reasoning, a message, calls) and one message for a template, so
neighbours of the assistant are joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.api.server.errors import bad
from paceline.core.errors import quoted

Item = Mapping[str, Any]
# Tuples, as what is looked for in them may be any JSON value.
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ROLES = ("user", "assistant", "system", "developer")


def items_of(given: str | Sequence[Item]) -> list[Item]:
    """A request's `input` as items; text is a user's message.

    Raises:
        ApiError: 400; there are none.
    """
    if isinstance(given, str):
        part = {"type": "input_text", "text": given}
        return [{"type": "message", "role": "user", "content": [part]}]
    if not given:
        msg = "input is empty; text or a list of at least one item is needed; add one"
        raise bad(msg, "input")
    return list(given)


def messages_of(
    items: Sequence[Item], instructions: str | None, *, first: int = 0, developer: bool = False
) -> list[dict[str, Any]]:
    """The conversation.

    Args:
        items: those of earlier turns, then the request's.
        instructions: of this turn, said first.
        first: index of the request's first item, from which errors count.
        developer: the template knows the role "developer"; otherwise it is the system's.

    Raises:
        ApiError: 400, naming the item.
    """
    found: list[dict[str, Any]] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    for index, item in enumerate(items):
        where = f"input.{index - first}"
        kind = item.get("type", "message" if "role" in item else None)
        match kind:
            case "message":
                _add_message(found, item, where, developer=developer)
            case "reasoning":
                _turn(found)["reasoning_content"] = _reasoning(item, where)
            case "function_call":
                _turn(found).setdefault("tool_calls", []).append(_call(item, where))
            case "function_call_output":
                found.append(_result(item, where))
            case _:
                msg = (
                    f"{where}: the type {quoted(kind)} is not served; message, reasoning, "
                    "function_call and function_call_output are; leave the item out"
                )
                raise bad(msg, f"{where}.type")
    for message in found:
        if message["role"] == "assistant":
            message.setdefault("content", None if "tool_calls" in message else "")
    return found


def _add_message(found: list[dict[str, Any]], item: Item, where: str, *, developer: bool) -> None:
    role = item.get("role")
    if role not in _ROLES:
        msg = f"{where}: the role {quoted(role)} is not known; {', '.join(_ROLES)} are; give one of these"
        raise bad(msg, f"{where}.role")
    text = _text(item.get("content"), f"{where}.content")
    if role == "assistant":
        turn = _turn(found)
        if "content" in turn or "tool_calls" in turn:
            found.append({"role": "assistant", "content": text})
        else:
            turn["content"] = text
        return
    found.append({"role": role if role != "developer" or developer else "system", "content": text})


def _turn(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that is going on, or a new one."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant"})
    return found[-1]


def _call(item: Item, where: str) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    call_id = item.get("call_id")
    if not (isinstance(name, str) and isinstance(arguments, str) and isinstance(call_id, str)):
        msg = (
            f"{where}: a function_call has the texts call_id, name and arguments; send it back as it "
            "came"
        )
        raise bad(msg, where)
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _result(item: Item, where: str) -> dict[str, Any]:
    call_id = item.get("call_id")
    if not isinstance(call_id, str):
        msg = f"{where}: call_id is {quoted(call_id)}; the id of the call is needed; send it back"
        raise bad(msg, f"{where}.call_id")
    text = _text(item.get("output"), f"{where}.output")
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _reasoning(item: Item, where: str) -> str:
    """Its text; a summary stands for one that has none."""
    for name in ("content", "summary"):
        value = item.get(name)
        if value:
            return _text(value, f"{where}.{name}")
    return ""


def _text(content: object, where: str) -> str:
    """The text of a string or of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        msg = (
            f"{where}: {quoted(content)} is no text; text or a list of parts is possible; send that"
        )
        raise bad(msg, where)
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if not isinstance(text, str) or kind not in (*_TEXTS, "refusal"):
            msg = (
                f"{where}: a part of type {quoted(kind)} is not served; text is (input_text, "
                "output_text); leave the part out"
            )
            raise bad(msg, where)
        texts.append(text)
    return "\n".join(texts)
