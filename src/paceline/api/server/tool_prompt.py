"""Puts functions, their calls and their results into the messages that a chat template renders.

A template that knows tools is given them, with the arguments of past calls in the form that it can write
(an object or JSON text). Any other gets Hermes' form: functions in the system message, calls in the
assistant's text, results in a user's message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.api.chat_template import Message
from paceline.api.server.errors import bad
from paceline.api.server.tool_parsers import hermes

_TOOLS = """# Tools

You may call one or more functions to help with what the user asks. Their signatures stand between \
<tools></tools> tags:
<tools>
{tools}
</tools>

For each call, write a JSON object with the function's name and its arguments between \
<tool_call></tool_call> tags:
<tool_call>
{{"name": <function name>, "arguments": <JSON object of arguments>}}
</tool_call>"""
_SYSTEM = frozenset({"system", "developer"})


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


def as_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages for a template that knows no tools: Hermes' form.

    Args:
        messages: OpenAI's.
        tools: those that the model is told of; there may be none.
    """
    found: list[dict[str, Any]] = []
    after_result = False
    for place, message in enumerate(messages):
        calls = _calls_of(message, place)
        if message.get("role") in {"tool", "function"}:
            text = f"<tool_response>\n{_text_of(message, place)}\n</tool_response>"
            if after_result:
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text})
            after_result = True
            continue
        after_result = False
        if calls:
            parts = [_text_of(message, place), *(_written(call) for call in calls)]
            rest = {n: v for n, v in message.items() if n not in {"content", "tool_calls"}}
            found.append({**rest, "content": "\n".join(part for part in parts if part)})
        else:
            found.append({name: v for name, v in message.items() if name != "tool_calls"})
    if not tools:
        return list(found)
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _TOOLS.format(tools=lines)
    if found and found[0].get("role") in _SYSTEM:
        return [{**found[0], "content": _appended(found[0].get("content"), text)}, *found[1:]]
    return [{"role": "system", "content": text}, *found]


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


def _written(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = _object_of(function.get("arguments") or {})
    body = {"name": function["name"], "arguments": arguments}
    return f"{hermes.OPEN}\n{json.dumps(body, ensure_ascii=False)}\n{hermes.CLOSE}"


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
