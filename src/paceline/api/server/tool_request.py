"""Reads what a request says about functions: `tools`, `tool_choice`, `parallel_tool_calls`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from paceline.api.server.errors import bad, shown
from paceline.core.errors import quoted

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
MAX_TOOLS = 512


class Mode(Enum):
    """Whether the model may call functions."""

    NONE = "none"  # it is told of none
    AUTO = "auto"
    REQUIRED = "required"  # the answer is calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function that the model may be told of.

    `schema` is that of its arguments, an object's; `strict`: arguments must follow it even where the
    model is free to call or not.
    """

    name: str
    description: str | None = None
    schema: Mapping[str, Any]
    strict: bool = False

    @property
    def tool(self) -> dict[str, Any]:
        """The function as templates are given it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.schema}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a request says about functions.

    Attributes:
        mode: see `Mode`; NONE where there are none.
        told: functions that the model is told of.
        allowed: those that it may call.
        single: one call at most.
    """

    mode: Mode = Mode.NONE
    told: Sequence[Function] = ()
    allowed: Sequence[Function] = ()
    single: bool = False

    @property
    def is_lazy(self) -> bool:
        """Whether text is free and calls are not: what begins as a call must go on as a right one."""
        if self.mode is not Mode.AUTO:
            return False
        narrowed = len(self.allowed) < len(self.told)
        return self.single or narrowed or any(function.strict for function in self.allowed)


def read_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: object = None,
    parallel_tool_calls: bool | None = None,
) -> ToolUse:
    """Understand a request's functions; forms of chat and of responses are both read.

    Args:
        tools: `{"type": "function", "function": {...}}`, or the same flat.
        tool_choice: "none", "auto", "required", a named function, or `allowed_tools`.
        parallel_tool_calls: False: one call at most.

    Raises:
        ApiError: 400, naming the field.
    """
    if tools is not None and len(tools) > MAX_TOOLS:
        msg = f"tools has {len(tools)} entries; at most {MAX_TOOLS} are possible; leave some out"
        raise bad(msg, "tools")
    functions = [_function(tool, index) for index, tool in enumerate(tools or ())]
    names = [function.name for function in functions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        msg = f"tools has two functions named {twice!r}; names must differ; rename one"
        raise bad(msg, "tools")
    mode, chosen = _choice(tool_choice, names)
    if not functions or mode is Mode.NONE:
        return ToolUse()
    allowed = [function for function in functions if chosen is None or function.name in chosen]
    # A function that is named is called once.
    named = isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function"
    single = named or parallel_tool_calls is False
    return ToolUse(mode=mode, told=functions, allowed=allowed, single=single)


def _function(tool: Mapping[str, Any], index: int) -> Function:
    where = f"tools.{index}"
    kind = tool.get("type")
    if kind != "function":
        msg = f"{where}: the type {quoted(kind)} is not served; functions are; leave it out"
        raise bad(msg, f"{where}.type")
    inner = tool.get("function", tool)
    if not isinstance(inner, Mapping):
        msg = (
            f"{where}.function: {quoted(inner)} is no function; an object with a name is possible; send "
            "that"
        )
        raise bad(msg, f"{where}.function")
    name, description = inner.get("name"), inner.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        msg = (
            f"{where}: the name {quoted(name)} cannot be a function's; 1 to 128 of the letters "
            "A-Z, a-z, digits and _ - . : are possible; rename it"
        )
        raise bad(msg, f"{where}.function.name")
    if description is not None and not isinstance(description, str):
        msg = (
            f"{where}: the description of {name} is {quoted(description)}; text is possible; write one, "
            "or leave it out"
        )
        raise bad(msg, f"{where}.function.description")
    strict = inner.get("strict")
    if strict is not None and not isinstance(strict, bool):
        msg = (
            f"{where}: strict of {name} is {quoted(strict)}; true or false is possible; choose one, or "
            "leave it out"
        )
        raise bad(msg, f"{where}.function.strict")
    schema = _schema(inner.get("parameters"), f"{where}.function.parameters")
    return Function(name=name, description=description, schema=schema, strict=bool(strict))


def _schema(given: object, where: str) -> Mapping[str, Any]:
    """The schema of arguments; without one there are none."""
    if given is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(given, Mapping) or given.get("type", "object") != "object":
        found = given.get("type") if isinstance(given, Mapping) else given
        msg = (
            f"{where}: {quoted(found)} is no object's schema; a JSON schema of an object is possible, as "
            "arguments have names; wrap other values in an object"
        )
        raise bad(msg, where)
    return {"type": "object", **given}


def _choice(given: object, names: Sequence[str]) -> tuple[Mode, Sequence[str] | None]:
    """The mode, and the functions that may be called; None: all."""
    match given:
        case None:
            return Mode.AUTO, None
        case "none":
            return Mode.NONE, None
        case "auto":
            return Mode.AUTO, None
        case "required":
            _need(names)
            return Mode.REQUIRED, None
        case {"type": "function", "function": {"name": str(name)}}:
            return Mode.REQUIRED, [_known(name, names)]
        case {"type": "function", "name": str(name)}:
            return Mode.REQUIRED, [_known(name, names)]
        case {"type": "allowed_tools", **rest}:
            return _allowed(rest.get("allowed_tools", rest), names)
        case _:
            asked = repr(shown(given)) if isinstance(given, str) else quoted(given)
            msg = (
                f'tool_choice {asked} is not known; "none", "auto", "required" and {{"type": '
                '"function", "function": {"name": ...}} are possible; choose one of these'
            )
            raise bad(msg, "tool_choice")


def _allowed(given: object, names: Sequence[str]) -> tuple[Mode, Sequence[str]]:
    mode = given.get("mode", "auto") if isinstance(given, Mapping) else None
    tools = given.get("tools") if isinstance(given, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        msg = (
            "tool_choice of type allowed_tools lacks a mode or tools; "
            '{"mode": "auto" or "required", "tools": [...]} with at least one tool is possible; give both'
        )
        raise bad(msg, "tool_choice")
    chosen = []
    for tool in tools:
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = inner.get("name") if isinstance(inner, Mapping) else None
        chosen.append(_known(name, names))
    return Mode(mode), chosen


def _known(name: object, names: Sequence[str]) -> str:
    if isinstance(name, str) and name in names:
        return name
    known = ", ".join(shown(known, 40) for known in names[:20]) or "none"
    msg = f"tool_choice names {quoted(name)}; the request's tools: {known}; name one of these"
    raise bad(msg, "tool_choice")


def _need(names: Sequence[str]) -> None:
    if not names:
        msg = 'tool_choice "required" needs tools to choose from; give `tools`, or leave it out'
        raise bad(msg, "tool_choice")
