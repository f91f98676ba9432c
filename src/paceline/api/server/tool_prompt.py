"""Puts functions, their calls and their results into the messages that a chat template renders.

A template that knows functions is given them; for any other the system message tells of them. One that
knows calls is given those, with arguments in the form that it can write (an object or JSON text); for any
other they stand in the assistant's text as the model is to write them, and results in a user's message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.api.chat_template import Message
from paceline.api.server.errors import bad
from paceline.api.server.tool_parsers.dialects import Dialect

_TOOLS = """# Tools

You may call one or more functions to help with what the user asks. Their signatures stand between \
<tools></tools> tags:
<tools>
{tools}
</tools>

To call functions, write each call with the function's name and a JSON object of its arguments, in this \
form:
{example}"""
_EXAMPLE = ("<function name>", "<JSON object of arguments>")
_SYSTEM, _RESULTS = ("system", "developer"), ("tool", "function")


def for_template(messages: Sequence[Message], *, text_arguments: bool) -> list[Message]:
    """Messages for a template that knows tools.

    Args:
        messages: OpenAI's.
        text_arguments: the template writes the arguments of past calls as they are, so they must be
            JSON text; otherwise it turns an object into JSON itself.
    """
    found: list[Message] = []
    for place, message in enumerate(messages):
        calls = _calls_of(message, place)
        if calls:
            called = [_call(call, text_arguments) for call in calls]
            found.append({**message, "content": message.get("content"), "tool_calls": called})
        else:
            found.append({name: v for name, v in message.items() if name != "tool_calls"})
    return found


def as_text(messages: Sequence[Message], dialect: Dialect) -> list[Message]:
    """Messages for a template that knows no calls: they stand in texts, results in a user's message.

    Args:
        messages: OpenAI's.
        dialect: how calls are written.
    """
    found: list[dict[str, Any]] = []
    after_result = False
    for place, message in enumerate(messages):
        calls = _calls_of(message, place)
        if message.get("role") in _RESULTS:
            text = f"<tool_response>\n{_text_of(message, place)}\n</tool_response>"
            if after_result:
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text})
            after_result = True
            continue
        after_result = False
        if calls:
            text = dialect.write([_written(call) for call in calls])
            parts = [_text_of(message, place), text]
            rest = {n: v for n, v in message.items() if n not in {"content", "tool_calls"}}
            found.append({**rest, "content": "\n".join(part for part in parts if part)})
        else:
            found.append({name: v for name, v in message.items() if name != "tool_calls"})
    return list(found)


def told_of(
    tools: Sequence[Mapping[str, Any]], messages: Sequence[Message], dialect: Dialect
) -> list[Message]:
    """Messages whose system message tells of functions, for a template that does not.

    Args:
        tools: those that the model is told of; there may be none.
        messages: as the template gets them.
        dialect: how calls are to be written.
    """
    if not tools:
        return list(messages)
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _TOOLS.format(tools=lines, example=dialect.write([_EXAMPLE]))
    if messages and messages[0].get("role") in _SYSTEM:
        first = messages[0]
        return [{**first, "content": _appended(first.get("content"), text)}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _calls_of(message: Message, place: int) -> Sequence[Mapping[str, Any]]:
    """The calls in an assistant's message, checked."""
    where = f"messages.{place}.tool_calls"
    calls = message.get("tool_calls")
    if calls is None:
        return ()
    if not isinstance(calls, list) or message.get("role") != "assistant":
        msg = f"{where}: a list of calls in an assistant's message is possible; correct the message"
        raise bad(msg, where)
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            msg = (
                f"{where}: a call without a function's name; possible is "
                '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "..."}}; '
                "send calls back as they came"
            )
            raise bad(msg, where)
    return calls


def _call(call: Mapping[str, Any], text_arguments: bool) -> dict[str, Any]:
    """A call with its arguments in the form that the template can write."""
    function = call["function"]
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if text_arguments:
        given: object = arguments if isinstance(arguments, str) else json.dumps(arguments)
    else:
        given = _object_of(arguments)
    return {"type": "function", **call, "function": {**function, "arguments": given}}


def _object_of(arguments: object) -> object:
    """JSON text as an object; what the model wrote wrong stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments


def _written(call: Mapping[str, Any]) -> tuple[str, str]:
    """The name, and the arguments as JSON text in one layout."""
    function = call["function"]
    arguments = _object_of(function.get("arguments") or {})
    return function["name"], json.dumps(arguments, ensure_ascii=False)


def _text_of(message: Message, place: int) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        where = f"messages.{place}.content"
        msg = f"{where}: text, or a list of text parts, is possible; leave out other parts"
        raise bad(msg, where)
    return "\n".join(str(text) for text in texts)


def _appended(content: object, text: str) -> object:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content}\n\n{text}" if content else text
