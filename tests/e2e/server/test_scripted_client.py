"""The official client and a model that says what a test wants: calls, reasoning and stored responses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from paceline.api.server.settings import ServerSettings
from paceline.core.request import Request
from tests.blocking import CLIENTS, openai_client
from tests.local_server import local_server, slowly, wait_for
from tests.scripted import MAX_LEN, script_of, thinker

TOKENIZER = thinker()
CALLS = (
    "<think>\nHm 🙂\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Look", "parameters": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
TOOL = {"type": "function", **FUNCTION, "strict": False}
ASK = [{"role": "user", "content": "Weather?"}]
ENDLESS = "and on " * 10_000  # within the context: minutes, as steps are slow meanwhile
SLOW = threading.Event()  # set: the engine takes its time


def says(request: Request) -> str:
    """Calls where functions were told of and none has answered; else what the prompt was."""
    prompt = TOKENIZER.decode(list(request.prompt_ids), skip_special_tokens=False)
    if "endless" in prompt:
        return ENDLESS
    if "<tools>" in prompt and "<tool_response>" not in prompt:
        return CALLS
    for mark, shown in (("<|im_end|>", "|"), ("tool_call>", "call>")):  # to be read, not acted on
        prompt = prompt.replace(mark, shown)
    return f"<think>Hm</think>{prompt}"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    def pause(number: int) -> None:
        if SLOW.is_set():
            slowly(number)

    settings = ServerSettings(
        served_model_name=("tiny",), api_key=("one", "two"), max_stored_responses=4
    )
    script = script_of(says, TOKENIZER)
    with local_server(
        script, settings=settings, tokenizer=TOKENIZER, max_len=MAX_LEN, on_step=pause
    ) as found:
        yield f"{found.url}/v1"


@pytest.fixture(params=CLIENTS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def client(url: str, kind: str) -> Iterator[OpenAI]:
    with openai_client(kind, url, "one") as found:
        yield found


@pytest.fixture
def slow() -> Iterator[None]:
    SLOW.set()
    yield
    SLOW.clear()


@pytest.fixture
def other(url: str, kind: str) -> Iterator[OpenAI]:
    with openai_client(kind, url, "two") as found:
        yield found


def test_calls_of_a_chat_come_whole_and_streamed(client: OpenAI) -> None:
    """The client's own accumulator puts the deltas together to the same message."""
    given: Any = {"model": "tiny", "messages": ASK, "tools": [CHAT_TOOL]}
    choice = client.chat.completions.create(**given).choices[0]
    assert choice.finish_reason == "tool_calls"
    message = choice.message
    assert message.content == "I look."
    assert message.model_extra == {"reasoning_content": "Hm 🙂"} | (message.model_extra or {})
    assert message.tool_calls is not None
    arguments = [call.function.arguments for call in message.tool_calls]  # type: ignore[union-attr]
    assert arguments == ['{"city": "Köln"}', '{"city": "Bonn"}']
    with client.chat.completions.stream(**given) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert final.finish_reason == "tool_calls"
    assert final.message.content == message.content
    assert final.message.tool_calls is not None
    told = [(call.function.name, call.function.arguments) for call in final.message.tool_calls]
    assert told == [("get_weather", text) for text in arguments]


def test_results_of_calls_go_back_to_the_model(client: OpenAI) -> None:
    """The round trip that agents make: the model sees its calls and what came of them."""
    first = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        tools=[CHAT_TOOL],  # type: ignore[list-item, arg-type]
    )
    message = first.choices[0].message
    assert message.tool_calls is not None
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"{place}°"}
        for place, call in enumerate(message.tool_calls)
    ]
    answer = client.chat.completions.create(
        model="tiny",
        messages=[*ASK, message, *results],  # type: ignore[list-item, arg-type]
        tools=[CHAT_TOOL],  # type: ignore[list-item, arg-type]
    )
    shown = answer.choices[0].message.content or ""
    assert '{"name": "get_weather", "arguments": {"city": "Köln"}}' in shown
    assert "<tool_response>\n0°\n</tool_response>\n<tool_response>\n1°\n</tool_response>" in shown


def test_no_functions_no_calls(client: OpenAI) -> None:
    """`tool_choice: none` leaves them out of the prompt."""
    answer = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        tools=[CHAT_TOOL],
        tool_choice="none",  # type: ignore[list-item, arg-type]
    )
    assert "tools" not in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 2


def test_a_response_streams_as_the_client_expects(client: OpenAI) -> None:
    """Its helper follows every event, and ends with the same response as a whole answer."""
    given: Any = {"model": "tiny", "input": "Weather?", "tools": [TOOL]}
    whole = client.responses.create(**given)
    with client.responses.stream(**given) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_text == whole.output_text == "I look."
    assert [item.type for item in final.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    raw = client.responses.create(**given, stream=True)
    numbers = [event.sequence_number for event in raw]
    assert numbers == list(range(len(numbers)))


class Weather(BaseModel):
    """For the client's own making of tools and parsing."""

    city: str


def test_the_clients_own_tools_are_parsed(client: OpenAI) -> None:
    """`parse` sends strict tools and reads the arguments back; strict is honoured while the model is free."""
    answer = client.responses.parse(
        model="tiny",
        input="Weather?",
        tools=[openai.pydantic_function_tool(Weather, name="get_weather")],
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [call.parsed_arguments for call in calls] == [Weather(city="Köln"), Weather(city="Bonn")]


def test_a_conversation_goes_on_by_the_id_of_its_last_response(client: OpenAI) -> None:
    """Earlier turns are in the prompt; instructions are not carried over."""
    first = client.responses.create(
        model="tiny", input="My name is Ada.", instructions="Speak German."
    )
    assert first.output_text.count("Speak German.") == 1
    second = client.responses.create(
        model="tiny", input="And now?", previous_response_id=first.id, instructions="Be brief."
    )
    assert second.previous_response_id == first.id
    prompt = second.output_text
    assert prompt.index("Be brief.") < prompt.index("My name is Ada.") < prompt.index("And now?")
    assert prompt.count("My name is Ada.") == 2  # the first answer repeated it
    third = client.responses.create(model="tiny", input="So?", previous_response_id=second.id)
    assert "And now?" in third.output_text
    items = client.responses.input_items.list(second.id)
    assert [item.type for item in items.data] == ["message", "reasoning", "message", "message"]


def test_results_of_calls_go_back_by_the_id_of_the_response(client: OpenAI) -> None:
    """As agents do it with responses."""
    first = client.responses.create(model="tiny", input="Weather?", tools=[TOOL])  # type: ignore[list-item]
    calls = [item for item in first.output if item.type == "function_call"]
    second = client.responses.create(
        model="tiny",
        previous_response_id=first.id,
        input=[
            {"type": "function_call_output", "call_id": call.call_id, "output": "12°"}
            for call in calls
        ],
        tools=[TOOL],  # type: ignore[list-item]
    )
    assert second.output_text.count("<tool_response>\n12°") == 2


def test_responses_are_kept_for_their_key_only(client: OpenAI, other: OpenAI) -> None:
    """Another key cannot read, go on with, call off or delete them."""
    made = client.responses.create(model="tiny", input="secret")
    assert client.responses.retrieve(made.id).output_text == made.output_text
    for attempt in (
        lambda: other.responses.retrieve(made.id),
        lambda: other.responses.delete(made.id),
        lambda: other.responses.cancel(made.id),
        lambda: other.responses.input_items.list(made.id),
        lambda: other.responses.create(model="tiny", input="x", previous_response_id=made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            attempt()
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_what_is_not_to_be_stored_is_not(client: OpenAI) -> None:
    """And what is stored gives way to newer ones."""
    made = client.responses.create(model="tiny", input="x", store=False)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="tiny", input="y", previous_response_id=made.id)
    assert caught.value.param == "previous_response_id"
    kept = client.responses.create(model="tiny", input="x")
    for _ in range(4):
        client.responses.create(model="tiny", input="y")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)


def test_a_streamed_response_is_kept_too(client: OpenAI) -> None:
    """Whole, as its last event has it."""
    with client.responses.stream(model="tiny", input="Hello") as stream:
        final = stream.get_final_response()
    assert client.responses.retrieve(final.id).output_text == final.output_text


def test_a_response_in_the_making_can_be_seen_and_called_off(
    client: OpenAI, other: OpenAI, slow: None
) -> None:
    """From another connection of the same key; its stream ends with what there was."""
    with client.responses.create(model="tiny", input="endless", stream=True) as stream:
        events = iter(stream)
        made = next(events).response.id  # type: ignore[union-attr]
        while next(events).type != "response.output_text.delta":
            pass
        assert client.responses.retrieve(made).status == "in_progress"
        with pytest.raises(openai.NotFoundError):
            other.responses.cancel(made)
        assert client.responses.cancel(made).status == "cancelled"
        last = list(events)[-1]
    assert last.response.status == "cancelled"  # type: ignore[union-attr]
    kept = client.responses.retrieve(made)
    assert kept.status == "cancelled"
    assert kept.output_text.startswith("and")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(made)


def test_a_client_that_leaves_ends_its_response(client: OpenAI, slow: None) -> None:
    """Nothing of it is kept, and the engine is free for others."""
    with client.responses.create(model="tiny", input="endless", stream=True) as stream:
        made = next(iter(stream)).response.id  # type: ignore[union-attr]
    assert client.responses.create(model="tiny", input="Hello").status == "completed"

    def forgotten() -> bool:
        try:
            client.responses.retrieve(made)
        except openai.NotFoundError:
            return True
        return False

    wait_for(forgotten)


def test_mistakes_in_responses_are_told(client: OpenAI) -> None:
    """With the field's own name, before anything is streamed."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="tiny", input="x", background=True, stream=stream)
        assert caught.value.param == "background"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_" + "x" * 300)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="tiny", input=[{"type": "item_reference", "id": "x"}])
