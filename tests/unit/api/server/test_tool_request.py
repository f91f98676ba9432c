"""What a request may say about functions, and how functions and calls are put to a template."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.api.server.tool_parsers.dialects import HERMES, KIMI_K2
from paceline.api.server.tool_prompt import as_text, for_template, told_of
from paceline.api.server.tool_request import MAX_TOOLS, Mode, read_tools
from tests.served import refusal

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Look", "parameters": SCHEMA},
}
NOW = {"type": "function", "name": "now", "strict": True}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'},
}


def test_functions_are_read_in_both_of_openais_forms() -> None:
    """Chat nests them, responses do not; one without parameters takes none."""
    use = read_tools([WEATHER, NOW])
    assert use.mode is Mode.AUTO
    weather, now = use.told
    assert (weather.name, weather.description, weather.schema) == ("get_weather", "Look", SCHEMA)
    assert (weather.strict, now.strict) == (False, True)
    assert now.schema == {"type": "object", "properties": {}, "additionalProperties": False}
    assert weather.tool == WEATHER


@pytest.mark.parametrize(
    "choice,mode,allowed",
    [
        (None, Mode.AUTO, ["get_weather", "now"]),
        ("auto", Mode.AUTO, ["get_weather", "now"]),
        ("none", Mode.NONE, []),
        ("required", Mode.REQUIRED, ["get_weather", "now"]),
        ({"type": "function", "function": {"name": "now"}}, Mode.REQUIRED, ["now"]),
        ({"type": "function", "name": "now"}, Mode.REQUIRED, ["now"]),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "now"}}],
                },
            },
            Mode.REQUIRED,
            ["now"],
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "now"}],
            },
            Mode.AUTO,
            ["now"],
        ),
    ],
)
def test_tool_choice_says_what_may_be_called(choice: Any, mode: Mode, allowed: list[str]) -> None:
    """Every form that OpenAI has for functions."""
    use = read_tools([WEATHER, NOW], choice)
    assert (use.mode, [function.name for function in use.allowed]) == (mode, allowed)
    named = isinstance(choice, dict) and choice["type"] == "function"
    assert use.single is named  # exactly one call of that function, as OpenAI has it


def test_calls_are_checked_only_where_that_was_asked() -> None:
    """Free answers stay unconstrained; strict, single or narrowed calls do not."""
    loose = {"type": "function", "name": "loose"}
    assert not read_tools([WEATHER, loose]).is_lazy
    assert read_tools([WEATHER, NOW]).is_lazy
    assert read_tools([WEATHER], None, False).is_lazy
    narrowed = {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER]}
    assert read_tools([WEATHER, loose], narrowed).is_lazy
    assert not read_tools([NOW], "required").is_lazy
    assert read_tools([], None, False).mode is Mode.NONE


@pytest.mark.parametrize(
    "tools,choice,param",
    [
        ([{"type": "web_search"}], None, "tools.0.type"),
        ([{"type": "function", "function": 3}], None, "tools.0.function"),
        ([{"type": "function"}], None, "tools.0.function.name"),
        ([{"type": "function", "name": "a b"}], None, "tools.0.function.name"),
        ([{"type": "function", "name": "x" * 129}], None, "tools.0.function.name"),
        ([{"type": "function", "name": "x\n"}], None, "tools.0.function.name"),
        ([WEATHER, {**NOW, "description": 3}], None, "tools.1.function.description"),
        ([{**NOW, "strict": "yes"}], None, "tools.0.function.strict"),
        ([{**NOW, "parameters": []}], None, "tools.0.function.parameters"),
        ([{**NOW, "parameters": {"type": "array"}}], None, "tools.0.function.parameters"),
        ([WEATHER, WEATHER], None, "tools"),
        ([WEATHER] * (MAX_TOOLS + 1), None, "tools"),
        ([], "required", "tool_choice"),
        (None, {"type": "function", "name": "now"}, "tool_choice"),
        ([WEATHER], {"type": "function", "function": {"name": "now"}}, "tool_choice"),
        ([WEATHER], "always", "tool_choice"),
        ([WEATHER], {"type": "web_search"}, "tool_choice"),
        ([WEATHER], 3, "tool_choice"),
        ([WEATHER], {"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice"),
        ([WEATHER], {"type": "allowed_tools", "mode": "auto", "tools": [3]}, "tool_choice"),
        ([WEATHER], {"type": "allowed_tools", "mode": [], "tools": [WEATHER]}, "tool_choice"),
    ],
)
def test_what_cannot_be_served_names_its_field(tools: Any, choice: Any, param: str) -> None:
    """A client learns which of its fields is at fault."""
    error = refusal(read_tools, tools, choice)
    assert (error.status, error.param) == (400, param)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "12°"},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "13°"}]},
    {"role": "user", "content": "Thanks", "tool_calls": None},
]


def test_a_template_that_knows_tools_gets_arguments_as_it_writes_them() -> None:
    """Some turn an object into JSON, others print text as it is."""
    shown = for_template(CHAT, text_arguments=False)
    assert shown[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Köln"}  # type: ignore[index]
    texts = for_template(CHAT, text_arguments=True)
    assert texts[2]["tool_calls"] == [CALL, CALL]
    assert "tool_calls" not in shown[5]
    silent = {"role": "assistant", "tool_calls": [CALL]}
    assert for_template([silent], text_arguments=True)[0]["content"] is None


@pytest.mark.parametrize(
    "given,text,value",
    [
        ("", "", {}),
        (None, "{}", {}),
        ({"a": 1}, '{"a": 1}', {"a": 1}),
        ("no json", "no json", "no json"),
    ],
)
def test_arguments_of_any_form_are_shown(given: object, text: str, value: object) -> None:
    """What a model wrote wrong is shown to it as it was."""
    call = {"type": "function", "function": {"name": "now", "arguments": given}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    for as_it_is, expected in ((True, text), (False, value)):
        [shown] = for_template([message], text_arguments=as_it_is)
        assert shown["tool_calls"][0]["function"]["arguments"] == expected  # type: ignore[index]


def test_any_other_template_gets_the_hermes_form() -> None:
    """Functions in the system's text, calls in the assistant's, results in a user's message."""
    found = told_of([WEATHER], as_text(CHAT, HERMES), HERMES)
    system, user, assistant, results, thanks = found
    assert user == CHAT[1]
    assert thanks == {"role": "user", "content": "Thanks"}
    text = str(system["content"])
    assert text.startswith("Be brief.\n\n# Tools")
    assert '<tools>\n{"type": "function", "function": {"name": "get_weather"' in text
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert assistant == {"role": "assistant", "content": f"I look.\n{call}\n{call}"}
    assert results == {
        "role": "user",
        "content": "<tool_response>\n12°\n</tool_response>\n<tool_response>\n13°\n</tool_response>",
    }


def test_the_hermes_form_makes_a_system_message_where_there_is_none() -> None:
    """And adds a part to one that is a list of parts; without functions nothing is added."""
    first, _ = told_of([WEATHER], CHAT[1:2], HERMES)
    assert (first["role"], str(first["content"])[:7]) == ("system", "# Tools")
    parts = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    [joined] = told_of([WEATHER], [parts], HERMES)
    assert len(joined["content"]) == 2  # type: ignore[arg-type]
    assert told_of([], as_text(CHAT[:2], HERMES), HERMES) == CHAT[:2]
    assert str(told_of([WEATHER], [], KIMI_K2)[0]["content"]).endswith(KIMI_K2.closes or "")


@pytest.mark.parametrize(
    "message,param",
    [
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": "x"}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": [3]}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages.0.tool_calls"),
    ],
)
def test_malformed_calls_in_messages_are_refused(message: dict[str, Any], param: str) -> None:
    """Whatever the template would make of them, the client is told."""
    for error in (
        refusal(for_template, [message], text_arguments=True),
        refusal(as_text, [message], HERMES),
    ):
        assert (error.status, error.param) == (400, param)


def test_roles_of_any_kind_are_left_to_the_template() -> None:
    """It says which it knows; nothing here breaks on them."""
    odd = [{"role": []}, {"role": {}, "tool_calls": None}]
    assert len(told_of([WEATHER], as_text(odd, HERMES), HERMES)) == 3
    assert len(for_template(odd, text_arguments=False)) == 2


def test_a_result_that_is_no_text_is_refused() -> None:
    """An image as a result cannot be shown to the model."""
    message = {"role": "tool", "content": [{"type": "image_url", "image_url": {}}]}
    assert refusal(as_text, [message], HERMES).param == "messages.0.content"
