"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from paceline.api.server.protocol import Count, Items, Messages
from paceline.api.server.protocol_sampling import SamplingFields
from paceline.core.sampling_rules import MAX_TOP_LOGPROBS


class ChatRequest(SamplingFields):
    """A conversation to be answered. Messages are checked by the template that renders them."""

    messages: Messages = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
