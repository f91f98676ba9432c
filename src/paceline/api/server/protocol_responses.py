"""The body of POST /v1/responses, in OpenAI's shape with the sampling fields of the other paths."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from paceline.api.server.protocol import Count, Fields, StreamOptions
from paceline.api.server.protocol_sampling import SamplingFields
from paceline.core.sampling_rules import MAX_TOP_LOGPROBS

ID = r"^resp_[A-Za-z0-9_.:-]{1,128}$"


class ResponseTextFormat(Fields):
    """What the answer's text must be like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


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

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: int | None = Field(None, ge=0, description="of built-in tools: there are none")
    previous_response_id: str | None = Field(None, max_length=200)
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = Field(None, max_length=64)
    reasoning: ResponseReasoning | None = None
    text: ResponseText | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    truncation: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
