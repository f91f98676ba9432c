"""The body of POST /v1/responses, in OpenAI's shape with the sampling fields of the other paths; answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from paceline.api.server.protocol import Count, Fields, Items, JsonSchemaFormat, StreamOptions
from paceline.api.server.protocol_answers import OF_BODIES, Answer, documented
from paceline.api.server.protocol_sampling import SamplingFields
from paceline.core.sampling_rules import MAX_TOP_LOGPROBS


class ResponseTextFormat(JsonSchemaFormat):
    """What the answer's text must be like: chat's `response_format`, its schema not in an object of its own."""

    type: Literal["text", "json_object", "json_schema"]


class ResponseText(Fields):
    """Settings of the text."""

    format: ResponseTextFormat | None = None
    verbosity: str | None = None


class ResponseReasoning(Fields):
    """Settings of the reasoning."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(StreamOptions):
    """Options of a stream."""

    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingFields):
    """A turn of a conversation. Items of `input` are checked where they become messages."""

    input: str | Items[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: int | None = Field(None, ge=0, description="of built-in tools: there are none")
    previous_response_id: str | None = Field(None, max_length=200)
    store: bool | None = None
    background: bool | None = None
    include: Items[str] | None = Field(None, max_length=64)
    reasoning: ResponseReasoning | None = None
    text: ResponseText | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    truncation: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: Items[dict[str, Any]] | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponseAnswer(Answer):
    """OpenAI's `response`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    usage: dict[str, Any] | None


class InputItems(Answer):
    """The conversation that a response answers."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class Deleted(Answer):
    """A response that is forgotten."""

    id: str
    object: Literal["response"]
    deleted: bool


_NAMED = (400, 401, 404)
RESPONSES: Mapping[str, dict[int | str, dict[str, Any]]] = {
    "create": documented(ResponseAnswer, (*OF_BODIES, 500, 503), streams=True),
    "get": documented(ResponseAnswer, _NAMED),
    "cancel": documented(ResponseAnswer, _NAMED),
    "input_items": documented(InputItems, _NAMED),
    "delete": documented(Deleted, _NAMED),
}
