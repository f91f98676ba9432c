"""The official client and a real model in a real process: calls that are forced are right ones."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

ASK = [{"role": "user", "content": "the end of the and the"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Köln", "🙂"]},
        "days": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now", "parameters": NOTHING}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def chat(client: OpenAI, **options: Any) -> Any:
    given = {"model": "tiny", "messages": ASK, "max_tokens": 200, "temperature": 1, **options}
    return client.chat.completions.create(**given)


def checked(calls: Any) -> None:
    """Every call is of a known function, and its arguments are what that function takes."""
    for call in calls:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "now":
            assert arguments == {}
        else:
            assert call.function.name == "get_weather"
            assert set(arguments) == {"city", "days"}
            assert arguments["city"] in {"Paris", "Köln", "🙂"}
            assert {1, 2} >= set(arguments["days"])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls_are_right_whatever_the_model(client: OpenAI, choice: Any, seed: int) -> None:
    """A random model, sampled at temperature 1, with a tree of drafts: one call, as the schema has it."""
    given = {"tools": [WEATHER, NOW], "tool_choice": choice}
    if choice == "required":
        given["parallel_tool_calls"] = False
    choice_ = chat(client, **given, seed=seed).choices[0]
    assert choice_.finish_reason == "tool_calls"
    assert choice_.message.content is None
    assert len(choice_.message.tool_calls) == 1
    checked(choice_.message.tool_calls)
    if choice == NAMED:
        assert choice_.message.tool_calls[0].function.name == "get_weather"


def test_forced_calls_stream_to_the_same(client: OpenAI) -> None:
    """The client's helper and the whole answer agree, deltas and all."""
    given = {
        "model": "tiny",
        "messages": ASK,
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 7,
        "max_tokens": 200,
    }
    whole = client.chat.completions.create(**given)
    with client.chat.completions.stream(**given) as stream:
        parts = [
            e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"
        ]
        final = stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls or []
    [same] = whole.choices[0].message.tool_calls or []
    assert call.function.arguments == same.function.arguments == "".join(parts)
    assert final.choices[0].finish_reason == "tool_calls"


def test_several_calls_are_right_ones(client: OpenAI) -> None:
    """As many as the model likes; the last may be cut by the limit."""
    message = chat(client, tools=[WEATHER, NOW], tool_choice="required", seed=3).choices[0].message
    assert message.tool_calls
    checked(message.tool_calls[:-1])


def test_drafts_change_no_call(client: OpenAI, plain_server: Any) -> None:
    """The same seed gives the same calls with the drafter and without."""
    given = {"tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False}
    with OpenAI(base_url=plain_server.v1, api_key="none", max_retries=0) as plain:
        for seed in range(3):
            found, same = (
                chat(one, **given, seed=seed).choices[0].message.tool_calls[0].function
                for one in (client, plain)
            )
            assert found == same


def test_free_answers_with_strict_functions_are_still_free(client: OpenAI) -> None:
    """A random model hardly ever begins a call; its text is its own."""
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    answer = chat(client, tools=[strict], max_tokens=24, temperature=0).choices[0]
    assert answer.message.tool_calls is None
    assert answer.message.content


def test_responses_force_calls_and_formats(client: OpenAI) -> None:
    """The same through /v1/responses."""
    given: Any = {"model": "tiny", "input": "the end", "max_output_tokens": 300}
    given["extra_body"] = {"seed": 10}
    tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    with client.responses.stream(
        **given, tools=[tool], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        for _ in stream:
            pass
        response = stream.get_final_response()
    [call] = response.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in {"Paris", "Köln", "🙂"}
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    given["max_output_tokens"] = 900  # a random model likes white space between tokens of JSON
    told = client.responses.create(**given, text={"format": form})
    assert set(json.loads(told.output_text)) == {"city", "days"}
    cut = client.responses.create(
        **{**given, "max_output_tokens": 3}, text={"format": form}
    )  # no object of this schema is so short
    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.usage.output_tokens == 3
    assert told.output_text.startswith(cut.output_text)


def test_tools_that_cannot_be_served_are_told(client: OpenAI) -> None:
    """With the function's place and the keyword."""
    odd = {"type": "object", "properties": {"a": {"if": {"type": "string"}}}}
    tool = {"type": "function", "function": {"name": "odd", "parameters": odd}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, tools=[NOW, tool], tool_choice="required")
    assert caught.value.param == "tools.1.function.parameters"
    assert "uses if (at #/properties/a)" in caught.value.body["message"]
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, tools=[NOW], tool_choice={"type": "function", "function": {"name": "x"}})
    assert caught.value.param == "tool_choice"
