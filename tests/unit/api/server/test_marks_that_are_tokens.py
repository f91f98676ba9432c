"""Families whose marks are special tokens, from the prompt to the wire: texts leave such tokens out otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.api.server import chat
from paceline.api.server.protocol_chat import ChatRequest
from paceline.api.server.tool_parsers.dialects import DIALECTS, Dialect
from paceline.api.server.tools import planner_of
from tests.byte_tokenizer import byte_tokenizer
from tests.scripted import scripted
from tests.served import answered, streamed

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "now")]
CALLS = [("get_weather", '{"city": "Köln 🙂"}'), ("now", "{}")]


def merged(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                found[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    found["tool_calls"].append((call["function"]["name"], ""))
                name, arguments = found["tool_calls"][call["index"]]
                arguments += call["function"]["arguments"]
                found["tool_calls"][call["index"]] = (name, arguments)
    return found


@pytest.mark.parametrize("width", [1, 8])
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_calls_survive_from_tokens_to_the_wire(dialect: Dialect, width: int) -> None:
    """Whole and streamed, with reasoning before; an end-of-text token is no part of anything."""
    tokenizer = byte_tokenizer([*dialect.marks, "<think>", "</think>"])
    says = f"<think>Hm</think>{dialect.write(CALLS)}"
    with scripted(says, tokenizer, width=width) as (llm, context, _):
        planner = planner_of(tokenizer, tool_call_parser=dialect.name)
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
        call = chat.read(ChatRequest.model_validate(body), context, planner=planner)
        assert not call.job.params.skip_special_tokens
        whole = answered(llm, call)["choices"][0]
        message = whole["message"]
        assert whole["finish_reason"] == "tool_calls"
        assert message["content"] is None
        assert message["reasoning_content"] == "Hm"
        functions = [each["function"] for each in message["tool_calls"]]
        assert [(f["name"], f["arguments"]) for f in functions] == CALLS
        told = merged(streamed(llm, call))
        assert told == {"content": "", "reasoning_content": "Hm", "tool_calls": CALLS}
