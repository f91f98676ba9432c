"""Responses: items in, items and typed events out, as the official client's types have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from openai.types import responses as official
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from paceline.api.grammar import Constraints
from paceline.api.server import responses
from paceline.api.server.errors import ApiError
from paceline.api.server.protocol_responses import ResponsesRequest
from paceline.api.server.responses import ResponseCall
from paceline.api.server.responses_events import ResponseEvents
from paceline.api.server.responses_input import items_of, messages_of
from tests.byte_tokenizer import CHATML, byte_tokenizer
from tests.scripted import scripted
from tests.served import refusal, results, run

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Look",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALLS = (
    "<think>\nHm 🙂\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
)


def read(context: Any, planner: Any, **body: Any) -> ResponseCall:
    request = ResponsesRequest.model_validate({"input": "hi", **body})
    return responses.read(request, context, planner=planner)


def told(says: str, *, width: int = 5, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream."""
    with scripted(says, width=width) as (llm, context, planner):
        call = read(context, planner, **body)
        events = ResponseEvents(call)
        found = events.start()
        for chunk in run(llm, call.job):
            found += events.take(chunk)
        assert all(name == event["type"] for name, event in found)
        return [event for _, event in found]


def answered(says: str, **body: Any) -> dict[str, Any]:
    """The whole response."""
    with scripted(says) as (llm, context, planner):
        call = read(context, planner, **body)
        [result] = results(run(llm, call.job))
        return ResponseEvents(call).whole(result)


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from one answer to the next."""
    left_out = {"id", "metrics", "timings", "completed_at", "created_at", "call_id", "usage"}
    output = [{k: v for k, v in i.items() if k not in left_out} for i in response["output"]]
    return {k: v for k, v in response.items() if k not in left_out} | {"output": output}


def test_a_text_becomes_a_message() -> None:
    """The official type takes it, and every field says what was asked."""
    found = answered(
        "It rains 🙂.",
        instructions="Be brief.",
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        user="me",
        seed=3,
    )
    response = Response.model_validate(found)
    assert response.output_text == "It rains 🙂."
    assert (response.status, response.model, response.object) == ("completed", "tiny", "response")
    assert (response.temperature, response.top_p) == (0.5, 0.9)
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert response.usage is not None
    usage = response.usage
    assert usage.input_tokens + usage.output_tokens == usage.total_tokens
    assert usage.output_tokens == len("It rains 🙂.".encode()) + 1
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert found["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert found["id"].startswith("resp_")
    assert response.output[0].id.startswith("msg_")  # type: ignore[union-attr]


def test_reasoning_text_and_calls_become_items() -> None:
    """In the order in which the model wrote them."""
    found = answered(CALLS, tools=[WEATHER])
    response = Response.model_validate(found)
    reasoning, message, first, second = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Hm 🙂"
    assert message.type == "message"
    assert response.output_text == "I look."
    assert first.type == second.type == "function_call"
    assert (first.name, first.arguments) == ("get_weather", '{"city": "Köln"}')
    assert (second.name, second.arguments) == ("get_weather", "{}")
    assert first.call_id != second.call_id
    assert response.tools[0].type == "function"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len("\nHm 🙂\n".encode())


@pytest.mark.parametrize("width", [1, 3, 8])
def test_a_stream_tells_the_same_as_a_whole_answer(width: int) -> None:
    """Events have the official types, count up, and add up to the response at their end."""
    events = told(CALLS, width=width, tools=[WEATHER])
    for event in events:
        EVENTS.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"] for event in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    last = events[-1]["response"]
    assert plain(last) == plain(answered(CALLS, tools=[WEATHER]))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    for index, item in enumerate(last["output"]):
        mine = [event for event in events if event.get("output_index") == index]
        kinds = [event["type"].removeprefix("response.") for event in mine]
        deltas = "".join(event.get("delta", "") for event in mine)
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert deltas == text
        assert kinds[0] == "output_item.added"
        assert kinds[-1] == "output_item.done"
        assert all(event.get("item_id", item["id"]) == item["id"] for event in mine)
        if item["type"] == "function_call":
            assert kinds[-2] == "function_call_arguments.done"
        else:
            assert kinds[1] == "content_part.added"
            assert kinds[-2] == "content_part.done"


def test_deltas_of_arguments_come_while_they_grow() -> None:
    """A call's item is there before its arguments are whole."""
    names = [event["type"] for event in told(CALLS, width=1, tools=[WEATHER])]
    assert names.count("response.function_call_arguments.delta") > 5


def test_an_answer_that_was_cut_is_incomplete() -> None:
    """The last item, the response and the last event say so."""
    events = told("It rains all day.", max_output_tokens=4)
    last = Response.model_validate(events[-1]["response"])
    assert events[-1]["type"] == "response.incomplete"
    assert last.status == "incomplete"
    assert last.incomplete_details is not None
    assert last.incomplete_details.reason == "max_output_tokens"
    assert last.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert last.output_text == "It r"


def test_an_empty_answer_is_an_empty_message() -> None:
    """Clients look for the text of the first message."""
    assert Response.model_validate(answered("")).output_text == ""


def test_a_failed_answer_says_so() -> None:
    """What came before is there, and the error is one that clients know."""
    with scripted("It rains") as (llm, context, planner):
        call = read(context, planner)
        events = ResponseEvents(call)
        chunks = run(llm, call.job)
        events.take(chunks[0])
        [*_, (name, last)] = events.fail(ApiError(500, "the engine has stopped"))
        assert not events.fail(ApiError(500, "again"))
    assert name == "response.failed"
    response = Response.model_validate(last["response"])
    assert response.error is not None
    assert (response.status, response.error.message) == ("failed", "the engine has stopped")
    assert response.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_log_probabilities_are_told_for_the_text_only() -> None:
    """Those of reasoning are not the text's; the entries' tokens spell the text."""
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    for says in ("It rains", "<think>It rains</think>\n\nIt rains"):
        found = Response.model_validate(answered(says, **include))
        message = found.output[-1]
        assert isinstance(message, official.ResponseOutputMessage)
        part = message.content[0]
        assert isinstance(part, official.ResponseOutputText)
        assert part.logprobs is not None
        assert "".join(entry.token for entry in part.logprobs) == "It rains"
        assert len(part.logprobs[0].top_logprobs) == 2
        for width in (1, 4, 8):
            events = told(says, width=width, **include)
            deltas = [e for e in events if e["type"] == "response.output_text.delta"]
            for event in deltas:
                assert "".join(x["token"] for x in event["logprobs"]) == event["delta"]
            assert "".join(event["delta"] for event in deltas) == "It rains"


def test_formats_of_the_text_constrain_the_answer() -> None:
    """`text.format` is chat's `response_format` under another name."""
    tokenizer = byte_tokenizer()
    with scripted("x", tokenizer, compiler=Constraints(tokenizer, tokenizer.vocab_size)) as (
        _,
        context,
        planner,
    ):
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
        call = read(context, planner, text={"format": form})
        assert call.job.constraint is not None
        state = call.job.constraint.start()
        assert all(state.advance(i) for i in tokenizer.encode('{"a": 1}'))
        echoed = responses.response_of(call, (), "in_progress")
        assert Response.model_validate(echoed).text is not None
        assert echoed["text"]["format"] == form
        assert read(context, planner, text={"format": {"type": "text"}}).job.constraint is None
        json = read(context, planner, text={"format": {"type": "json_object"}})
        assert json.job.constraint is not None
        own = read(context, planner, text={"format": {"type": "json_object", "schema": schema}})
        assert own.job.constraint is not None
        state = own.job.constraint.start()
        assert not all(state.advance(i) for i in tokenizer.encode('{"b": 1}'))
        forced = read(
            context,
            planner,
            tools=[WEATHER],
            tool_choice={"type": "function", "name": "get_weather"},
            parallel_tool_calls=False,
        )
        assert forced.job.constraint is not None
        for more, place in (
            ({"type": "text", "schema": schema}, "text.format.schema"),
            ({"type": "json_schema"}, "text.format.schema"),
            ({"type": "json_object", "json_schema": form}, "text.format.json_schema"),
        ):
            error = refusal(read, context, planner, text={"format": more})
            assert (error.status, error.param) == (400, place)
        bad = {"type": "json_schema", "name": "a", "schema": {"type": "object", "if": {}}}
        error = refusal(read, context, planner, text={"format": bad})
        assert (error.status, error.param) == (400, "text.format")


HISTORY: Sequence[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm"}],
    },
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
    },
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "12°"},
    {
        "type": "function_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": "9°"}],
    },
    {"role": "assistant", "content": "12° and 9°."},
    {"role": "assistant", "content": "Bye."},
]


def test_items_become_messages() -> None:
    """Reasoning, text and calls of one turn are one message of the assistant."""
    call = {"type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    assert messages_of(HISTORY, "Speak German.") == [
        {"role": "system", "content": "Speak German."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "reasoning_content": "Hm",
            "content": "I look.",
            "tool_calls": [{"id": "c1", **call}, {"id": "c2", **call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "12°"},
        {"role": "tool", "tool_call_id": "c2", "content": "9°"},
        {"role": "assistant", "content": "12° and 9°."},
        {"role": "assistant", "content": "Bye."},
    ]
    assert messages_of(HISTORY[:1], None, developer=True)[0]["role"] == "developer"
    assert messages_of(HISTORY[4:5], None)[0]["content"] is None
    assert messages_of(HISTORY[2:3], None)[0]["content"] == ""
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So"}]}
    assert messages_of([summary], None)[0]["reasoning_content"] == "So"
    assert messages_of(items_of("hi"), None) == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "item,param",
    [
        ({"type": "item_reference", "id": "msg_1"}, "input.0.type"),
        ({}, "input.0.type"),
        ({"role": "king", "content": "x"}, "input.0.role"),
        ({"role": [], "content": "x"}, "input.0.role"),
        ({"type": {}}, "input.0.type"),
        ({"role": "user", "content": [{"type": [], "text": "x"}]}, "input.0.content"),
        ({"role": "user"}, "input.0.content"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input.0.content"),
        ({"role": "user", "content": ["x"]}, "input.0.content"),
        ({"type": "function_call", "name": "x", "arguments": "{}"}, "input.0"),
        ({"type": "function_call_output", "output": "x"}, "input.0.call_id"),
        ({"type": "function_call_output", "call_id": "x", "output": 3}, "input.0.output"),
    ],
)
def test_items_that_cannot_be_shown_name_themselves(item: dict[str, Any], param: str) -> None:
    """Counted from the request's own first item, whatever came before."""
    earlier = [{"role": "user", "content": "x"}]
    error = refusal(messages_of, [*earlier, item], None, first=1)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    "fields,param",
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{}]}, "context_management"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"request_id": "x"}, "request_id"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"paceline": {"sources": True}}, "paceline"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"input": []}, "input"),
        ({"input": "x" * 200_000}, "input"),
        ({"max_output_tokens": 200_000}, "max_output_tokens"),
        ({"model": "other"}, "model"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ],
)
def test_what_cannot_be_honoured_is_refused(fields: dict[str, Any], param: str) -> None:
    """Nothing is silently ignored; the field has the name that the client used."""
    with scripted("x") as (_, context, planner):
        error = refusal(read, context, planner, **fields)
    assert (error.status, error.param) == (404 if param == "model" else 400, param)


def test_what_asks_for_nothing_is_taken() -> None:
    """Clients send defaults and facts about themselves."""
    found = answered(
        "x",
        background=False,
        truncation="disabled",
        n=1,
        include=[],
        reasoning={"effort": None, "summary": "auto"},
        text={"verbosity": "medium"},
        service_tier="auto",
        stream_options={"include_obfuscation": False},
        prompt_cache_key="k",
        safety_identifier="s",
        max_tool_calls=3,
        tool_choice="none",
        store=False,
    )
    response = Response.model_validate(found)
    assert (response.prompt_cache_key, response.safety_identifier) == ("k", "s")
    assert (response.max_tool_calls, response.tool_choice) == (3, "none")
    assert found["store"] is False


def test_a_template_that_knows_developers_gets_them() -> None:
    """Where it does not, their words are the system's."""
    for template, role in ((CHATML, "system"), (CHATML + "{# developer #}", "developer")):
        with scripted("x", byte_tokenizer(template=template)) as (_, context, planner):
            call = read(context, planner, input=list(HISTORY[:2]))
            assert call.call.prompt.startswith(f"<|im_start|>{role}\nBe brief.")
