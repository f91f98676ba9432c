"""Turns a list of chat messages into the text that a model was trained on.

A chat template is a Jinja program that comes with the model, so it is untrusted code: it runs in a
bounded sandbox (template_sandbox.py) and sees nothing but plain data. The environment is the one they are
written for (that of transformers): blocks are trimmed, `break` and `continue` exist, `tojson` does not
escape HTML, `raise_exception` and `strftime_now` are there, `{% generation %}` marks are ignored.
Not for: tokens (tokenizer.py), tool calls' meaning, images.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from paceline.api.template_sandbox import BoundedEnvironment, TemplateBudgetError, bounded
from paceline.core.errors import TemplateError

logger = logging.getLogger(__name__)

Message: TypeAlias = Mapping[str, object]
_Data: TypeAlias = "bool | int | float | str | list[_Data] | dict[str, _Data] | None"

# A role is known if it is one of these or if the template names it.
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_CONTENT_HOLDERS = ("content", "tool_calls", "reasoning_content")
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
# Some templates know a message that is calls of functions by its content of None.
_ASKS_FOR_NONE = re.compile(r"""content['"]?\]?\s+is\s+(not\s+)?none""")
_PROBE = "paceline content probe"


def render(
    source: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    variables: Mapping[str, object],
) -> str:
    """Render a conversation.

    Args:
        source: the template, Jinja source.
        messages: objects with `role` and `content`; content is a string or a list of
            `{"type": "text", "text": ...}`. A list is handed on to templates that walk lists, and
            joined by newlines for those that expect a string.
        add_generation_prompt: end with the opening of an assistant's message.
        variables: what else the template sees: `bos_token`, `tools`, `enable_thinking`, ...

    Raises:
        TemplateError: the messages are malformed, or the template does not parse, raised, or did not
            come to an end.
    """
    template = _compile(source)
    plain = [_message(message, index, source) for index, message in enumerate(_listed(messages))]
    if any(isinstance(message.get("content"), list) for message in plain):
        plain = plain if _walks_lists(source) else [_joined(message) for message in plain]
    data: dict[str, object] = {
        name: _plain(value, f"template variable {name!r}") for name, value in variables.items()
    }
    data |= {"messages": plain, "add_generation_prompt": add_generation_prompt}
    try:
        return template.render(bounded(data))
    except TemplateBudgetError as error:
        msg = (
            f"the model's chat template does not come to an end: {error}; it was given {len(plain)} "
            "messages. Real templates need a small part of that: pass another template, or correct "
            "the loops of this one"
        )
        raise TemplateError(msg) from error
    except Exception as error:  # whatever a foreign program raises
        msg = (
            f"the model's chat template raised {type(error).__name__}: {error}; it was given "
            f"{len(plain)} messages with roles {', '.join(str(m['role']) for m in plain)}; change "
            "the messages to what the template allows, or pass another template"
        )
        raise TemplateError(msg) from error


def _listed(messages: object) -> Sequence[object]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        found = type(messages).__name__
        msg = (
            f"cannot render a chat from a {found}; a list of messages is needed; pass "
            '[{"role": "user", "content": "..."}]'
        )
        raise TemplateError(msg)
    if not messages:
        msg = (
            "cannot render a chat without messages; at least one is needed; pass "
            '[{"role": "user", "content": "..."}]'
        )
        raise TemplateError(msg)
    return messages


def _message(message: object, index: int, source: str) -> dict[str, _Data]:
    """A message as plain data, without None values, which many templates would print."""
    where = f"message {index}"
    if not isinstance(message, Mapping):
        msg = (
            f"{where} is a {type(message).__name__}; an object with `role` and `content` is needed; "
            'pass {"role": "user", "content": "..."}'
        )
        raise TemplateError(msg)
    plain = cast("dict[str, _Data]", _plain(message, where))
    asks = "tool_calls" in plain and "content" in plain and _ASKS_FOR_NONE.search(source)
    plain = {key: v for key, v in plain.items() if v is not None or (asks and key == "content")}
    role = plain.get("role")
    if role is None:
        msg = (
            f"{where} has no role; {', '.join(KNOWN_ROLES)} and those that the model's template names are "
            "possible; give the message a `role`"
        )
        raise TemplateError(msg)
    if not isinstance(role, str) or not (role in KNOWN_ROLES or _names(source, role)):
        msg = (
            f"{where} has the unknown role {role!r}; known roles: {', '.join(KNOWN_ROLES)}, and "
            "those that the model's template names; change the role"
        )
        raise TemplateError(msg)
    reasoning = next((plain[name] for name in _REASONING_NAMES if name in plain), None)
    if reasoning is not None:  # clients and templates use different names for it
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    if not any(key in plain for key in _CONTENT_HOLDERS):
        msg = (
            f"{where} ({role}) has no content; a string or a list of text parts is possible; give "
            "the message a `content`"
        )
        raise TemplateError(msg)
    _check_content("" if (content := plain.get("content")) is None else content, where)
    return plain


def _check_content(content: _Data, where: str) -> None:
    """Text only: a string or a list of text parts."""
    if isinstance(content, str):
        return
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if isinstance(part, dict) and kind == "text" and isinstance(part.get("text"), str):
            continue
        if kind == "text":
            msg = (
                f"{where} has a part of type 'text' without `text`; a string is possible there; write "
                '{"type": "text", "text": "..."}, or remove the part'
            )
            raise TemplateError(msg)
        msg = (
            f"{where} has content of type {kind!r}; a string or a list of "
            '{"type": "text", "text": "..."} is possible; remove the other parts'
        )
        raise TemplateError(msg)


def _joined(message: dict[str, _Data]) -> dict[str, _Data]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [str(part["text"]) for part in content if isinstance(part, dict)]
    return {**message, "content": "\n".join(texts)}


def _plain(value: object, where: str) -> _Data:
    """Rebuild a value from JSON's types: whatever else the sandbox would let a template call."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    msg = (
        f"{where} holds a {type(value).__name__}; strings, numbers, booleans, None, lists and "
        "objects are possible, as in JSON; convert it"
    )
    raise TemplateError(msg)


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError) as error:
        msg = (
            f"the model's chat template does not parse: {error}; Jinja with the extensions of "
            "transformers is possible; repair the template in the model's files or pass another one"
        )
        raise TemplateError(msg) from error


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationMarks],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return dt.datetime.now().strftime(layout)  # noqa: DTZ005 (templates mean local time)


class _GenerationMarks(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}` tells trainers what an assistant wrote: ignored."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the inside, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


@functools.lru_cache(maxsize=32)
def _literals(source: str) -> frozenset[str]:
    """The string literals of a template."""
    tree = _environment().parse(source)
    return frozenset(
        node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)
    )


def _names(source: str, role: str) -> bool:
    return role in _literals(source)


@functools.lru_cache(maxsize=32)
def _walks_lists(source: str) -> bool:
    """Whether the template takes a content that is a list of parts; found out by trying."""
    parts: list[dict[str, str]] = [{"type": "text", "text": _PROBE}]
    message = {"role": "user", "content": parts}
    try:
        data = {"messages": [message], "add_generation_prompt": False}
        text = _compile(source).render(bounded(data))
    except Exception as error:  # noqa: BLE001 (a foreign program; it is given a string then)
        logger.debug("the chat template takes no lists of parts: %s", error)
        return False
    return _PROBE in text and "'type'" not in text and '"type"' not in text
