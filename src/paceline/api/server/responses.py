"""Responses: a request of /v1/responses is read as a conversation, and its answer as a list of items.

All that chat completions know is theirs: the job, the prompt, tools and reasoning (chat.py). Pure
functions and values: no HTTP, no engine, no store.
Not for: the events of a stream (responses_events.py), what is kept (response_store.py).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.api.server import chat
from paceline.api.server.accounting import figures_of
from paceline.api.server.errors import ApiError
from paceline.api.server.plan import PLAIN, Planner
from paceline.api.server.protocol import ResponseFormat
from paceline.api.server.protocol_chat import ChatRequest
from paceline.api.server.protocol_refused import check_fields
from paceline.api.server.protocol_sampling import SamplingFields
from paceline.api.server.responses_checks import LOGPROBS, check_refused
from paceline.api.server.responses_input import Item, items_of, messages_of
from paceline.api.server.tool_request import read_tools

if TYPE_CHECKING:
    from paceline.api.results import Result
    from paceline.api.server.context import Context
    from paceline.api.server.job import Job
    from paceline.api.server.protocol_responses import ResponsesRequest, ResponseTextFormat

# What chat calls a field, and its name here.
_RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.schema": "text.format.schema",
    "response_format.json_schema.schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCall:
    """A request that was read.

    Attributes:
        body: the request.
        id: of the answer.
        created: Unix seconds.
        inputs: items of the conversation, earlier turns included.
        call: the same as a chat, with the job.
    """

    body: ResponsesRequest
    id: str
    created: int
    inputs: Sequence[Item]
    call: chat.ChatCall

    @property
    def job(self) -> Job:
        """What it asks of the engine."""
        return self.call.job

    @property
    def is_stored(self) -> bool:
        """Whether its answer is kept."""
        return self.body.store is not False

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text's tokens are told with their log-probabilities."""
        return LOGPROBS in (self.body.include or ())


def read(
    body: ResponsesRequest,
    context: Context,
    *,
    planner: Planner = PLAIN,
    tenant: str = "",
    earlier: Sequence[Item] = (),
) -> ResponseCall:
    """Understand a request.

    Args:
        body: the request.
        context: what is served.
        planner: knows the model's tools and reasoning.
        tenant: see `sampling.scope_of`.
        earlier: items of the conversation that `previous_response_id` names.

    Raises:
        ApiError: 400 or 404; the request cannot be served.
    """
    check_fields(body, strict=context.strict)
    check_refused(body)
    inputs = [*earlier, *items_of(body.input)]
    developer = any("developer" in text for text in context.tokenizer.chat_templates.values())
    messages = messages_of(inputs, body.instructions, first=len(earlier), developer=developer)
    # Checked already, in the places that this request has.
    asked = ChatRequest.model_construct(
        _fields_set=None, **{**_sampling(body), **_chat_fields(body), "messages": messages}
    )
    try:
        call = chat.read(asked, context, planner=planner, tenant=tenant)
    except ApiError as error:
        if error.param in _RENAMED:
            error.param = _RENAMED[error.param]
        raise
    return ResponseCall(
        body=body,
        id=f"resp_{secrets.token_hex(24)}",
        created=int(time.time()),
        inputs=inputs,
        call=call,
    )


def _sampling(body: ResponsesRequest) -> dict[str, Any]:
    """The fields that all paths share."""
    own = {"max_tokens", "n", "response_format", "stream_options"}
    return {name: getattr(body, name) for name in SamplingFields.model_fields if name not in own}


def _chat_fields(body: ResponsesRequest) -> dict[str, Any]:
    return {
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _format(body.text.format if body.text else None),
        "tools": body.tools,
        "tool_choice": body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "logprobs": LOGPROBS in (body.include or ()) or None,
        "top_logprobs": body.top_logprobs,
        "chat_template_kwargs": body.chat_template_kwargs,
    }


def _format(form: ResponseTextFormat | None) -> Any:
    """`text.format` as chat's `response_format`."""
    if form is None:
        return None
    return ResponseFormat.model_validate({"type": form.type, "schema": form.schema_})


def response_of(
    call: ResponseCall,
    output: Sequence[Mapping[str, Any]],
    status: str,
    *,
    result: Result | None = None,
    error: ApiError | None = None,
) -> dict[str, Any]:
    """A response object.

    Args:
        call: the request.
        output: items so far.
        status: in_progress, completed, incomplete, failed or cancelled.
        result: of the engine, once it has ended.
        error: why it failed.
    """
    body, params = call.body, call.job.params
    format_ = body.text.format if body.text else None
    found: dict[str, Any] = {
        "id": call.id,
        "object": "response",
        "created_at": call.created,
        "status": status,
        "background": False,
        "error": None if error is None else _failure(error),
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": call.call.head.model,
        "output": list(output),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": body.reasoning.effort if body.reasoning else None,
            "summary": body.reasoning.summary if body.reasoning else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": call.is_stored,
        "temperature": params.temperature,
        "text": {
            "format": {"type": "text"}
            if format_ is None
            else format_.model_dump(by_alias=True, exclude_none=True),
            "verbosity": "medium",
        },
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_tool(function) for function in read_tools(body.tools, "auto").told],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None if result is None else _usage(call, result),
        "user": body.user,
    }
    if status == "completed":
        found["completed_at"] = int(time.time())
    if result is not None:
        found |= figures_of([result], call.call.context)
    return found


def _failure(error: ApiError) -> dict[str, Any]:
    """OpenAI has two names for what can go wrong here."""
    code = "invalid_prompt" if error.status < 500 else "server_error"
    return {"code": code, "message": error.message}


def _tool(function: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "name": function.name,
        "description": function.description,
        "parameters": function.schema,
        "strict": function.strict,
    }


def _usage(call: ResponseCall, result: Result) -> dict[str, Any]:
    prompt, made = len(result.prompt_ids), len(result.token_ids)
    plan = call.call.plan
    reasoning = plan.reasoning_tokens(call.call.prompt, result.token_ids) or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": result.stats.num_cached_tokens,
            "cache_write_tokens": 0,  # writing to the cache is not charged, so it is not counted
        },
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + made,
    }
