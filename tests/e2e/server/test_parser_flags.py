"""`tool_call_parser` and `reasoning_parser` of the server decide how answers are read; the async client sees it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from paceline.api.server.settings import ServerSettings
from tests.local_server import local_server
from tests.scripted import MAX_LEN, script_of, thinker

BARE = '{"name": "now", "parameters": {"a": [1]}}'
HERMES = '<tool_call>{"name": "now", "arguments": {"a": [1]}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "now"}}


async def both(url: str) -> tuple[Any, Any]:
    """A chat as it comes in a stream, and a response."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "When?"}]
        async with client.chat.completions.stream(
            model="tiny",
            messages=messages,
            tools=[TOOL],  # type: ignore[list-item]
        ) as stream:
            async for _ in stream:
                pass
            chat = (await stream.get_final_completion()).choices[0].message
        flat: Any = {"type": "function", "name": "now", "strict": False, "parameters": None}
        async with client.responses.stream(model="tiny", input="When?", tools=[flat]) as events:
            response = await events.get_final_response()
        return chat, response


@pytest.mark.parametrize(
    "flags,says,content,is_call",
    [
        ({}, f"<think>Hm</think>{HERMES}", None, True),
        ({}, BARE, BARE, False),
        ({"tool_call_parser": "llama3_json"}, BARE, None, True),
        ({"tool_call_parser": "llama3_json"}, HERMES, HERMES, False),
        ({"reasoning_parser": "none"}, f"<think>Hm</think>{HERMES}", "<think>Hm</think>", True),
    ],
)
def test_flags_say_how_answers_are_read(
    flags: dict[str, str], says: str, content: str | None, is_call: bool
) -> None:
    """What one family calls a call is text to another."""
    tokenizer = thinker()
    settings = ServerSettings(served_model_name=("tiny",), **flags)  # type: ignore[arg-type]
    script = script_of(says, tokenizer)
    with local_server(script, settings=settings, tokenizer=tokenizer, max_len=MAX_LEN) as found:
        chat, response = asyncio.run(both(found.url))
    assert (chat.content or None) == content
    assert response.output_text == (content or "")
    calls = [item for item in response.output if item.type == "function_call"]
    assert bool(chat.tool_calls) is bool(calls) is is_call
    if is_call:
        assert chat.tool_calls[0].function.arguments == calls[0].arguments == '{"a": [1]}'
