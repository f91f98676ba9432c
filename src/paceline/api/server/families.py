"""Which family a model belongs to: how it writes calls and reasoning, and what its template can write.

Seen once, from the chat template and the vocabulary, or said by flags. Pure functions of a tokenizer.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from paceline.api.server.reasoning import ThinkForm
from paceline.api.server.tool_parsers.dialects import DIALECTS, HERMES, Dialect, recognised
from paceline.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from paceline.api.chat_template import Message
    from paceline.api.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
# vLLM's names; they write alike.
THINKERS = ("qwen3", "deepseek_r1", "kimi_k2")
_DEFAULT, _TOOL_USE = "default", "tool_use"


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Refuse unknown names (`planner_of`) before a model is loaded.

    Raises:
        ConfigError: the message lists the names there are.
    """
    choose_dialect("", tool_call_parser)
    _check_thinker(reasoning_parser)


def _check_thinker(name: str | None) -> None:
    if name not in {None, AUTO, NONE, *THINKERS}:
        msg = (
            f"reasoning_parser {name!r} is not known; {AUTO}, {NONE}, {', '.join(THINKERS)} are "
            "possible; choose one of these"
        )
        raise ConfigError(msg)


def choose_dialect(template: str, name: str | None) -> Dialect:
    """How a model with this chat template writes calls (`planner_of`).

    Raises:
        ConfigError: an unknown name.
    """
    if name is None or name == AUTO:
        return recognised(template) or HERMES
    if name not in DIALECTS:
        msg = (
            f"tool_call_parser {name!r} is not known; {AUTO}, {', '.join(DIALECTS)} are possible; "
            "choose one of these"
        )
        raise ConfigError(msg)
    return DIALECTS[name]


def choose_thinking(tokenizer: Tokenizer, name: str | None) -> ThinkForm | None:
    """How a model marks its reasoning (`planner_of`).

    Raises:
        ConfigError: an unknown name.
    """
    _check_thinker(name)
    form = ThinkForm()
    if name == NONE:
        return None
    if name in THINKERS:
        return form
    template = template_of(tokenizer)
    marked = form.opens in template or form.closes in template
    return form if marked or tokenizer.backend.token_to_id(form.closes) is not None else None


def template_of(tokenizer: Tokenizer) -> str:
    """The template that renders requests with tools; "": there is none."""
    templates = tokenizer.chat_templates
    return templates.get(_TOOL_USE) or templates.get(_DEFAULT) or ""


_PROBE = "paceline_probe"
_PROBE_ARGUMENTS = re.compile(r'"paceline"\s*:\s*"pro\\"be"')
_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "Look",
        "parameters": {"type": "object", "properties": {"paceline": {"type": "string"}}},
    },
}


def shows_tools(tokenizer: Tokenizer) -> bool:
    """Whether the template writes the functions that it is given; found out by trying."""
    messages: list[Message] = [{"role": "user", "content": "Hello"}]
    try:
        return _PROBE in tokenizer.chat_text(messages, tools=[_TOOL])
    except RequestError:
        return False


def shows_calls(tokenizer: Tokenizer, *, text: bool) -> bool:
    """Whether the template writes a past call's arguments as JSON; found out by trying.

    Args:
        tokenizer: has the template.
        text: they are given as JSON text, else as an object.
    """
    arguments: object = {"paceline": 'pro"be'}
    function = {"name": _PROBE, "arguments": json.dumps(arguments) if text else arguments}
    call: dict[str, Any] = {"id": "functions.x:0", "type": "function", "function": function}
    messages: list[Message] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.x:0", "content": "Found"},
    ]
    try:
        shown = tokenizer.chat_text(messages, tools=[_TOOL])
    except RequestError:
        return False
    return _PROBE_ARGUMENTS.search(shown) is not None and "Found" in shown
