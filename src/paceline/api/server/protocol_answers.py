"""What answers look like, for /openapi.json and for tests; the server builds them as plain objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """An object of an answer."""

    model_config = ConfigDict(extra="allow")


class ErrorFields(Answer):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | int


class ErrorAnswer(Answer):
    """The body of every answer that is not 2xx."""

    error: ErrorFields


class Usage(Answer):
    """OpenAI's `usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int] | None = None


class SpeculationFigures(Answer):
    """vLLM's `metrics.speculative_decoding`; the length counts the token that the model adds itself."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    num_drafts: int
    num_forced_tokens: int
    num_verified_nodes: int
    method: str
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


class Figures(Answer):
    """`metrics` of an answer that is alone; times are the engine's."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    prefill_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float
    num_preemptions: int
    seed: int
    speculative_decoding: SpeculationFigures | None = None


class Timings(Answer):
    """llama.cpp's `timings`."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    draft_n: int | None = None
    draft_n_accepted: int | None = None


class Whole(Answer):
    """What whole answers have in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: Figures | None = None
    timings: Timings | None = None


class PromptLogprob(Answer):
    """One token of a place of the prompt; the rank counts from 1."""

    logprob: float
    rank: int
    decoded_token: str


# vLLM's: per token of the prompt, by id, that token and the likeliest; the first has none.
PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]


class Message(Answer):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(Answer):
    """One sample of a chat answer."""

    index: int
    message: Message
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None


class ChatAnswer(Whole):
    """The answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None


class CompletionLogprobs(Answer):
    """Four lists in step."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null: an echoed prompt's first token
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One sample of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionAnswer(Whole):
    """The answer of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TokenizeAnswer(Answer):
    """The answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class RenderAnswer(Answer):
    """The answer of POST /v1/chat/completions/render."""

    object: Literal["chat.completion.render"]
    model: str
    prompt: str
    prompt_token_ids: list[int]
    count: int
    max_tokens: int
    max_model_len: int


class DetokenizeAnswer(Answer):
    """The answer of POST /detokenize."""

    prompt: str
    content: str


class ModelCard(Answer):
    """One name under which the model is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Answer):
    """The answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard] = Field(min_length=1)


# Of each event, as readers of a stream hand it on.
_EVENT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_EVENTS: Mapping[str, Any] = {"text/event-stream": {"schema": _EVENT}}
_WRONG: Mapping[int, str] = {
    400: "The request is not valid, or asks for what cannot be honoured.",
    401: "No good API key was shown.",
    404: "No such model.",
    408: "The body came too slowly.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    500: "The engine failed.",
    503: "Too much is waiting, or the server is shutting down: see Retry-After.",
}


def documented(
    model: type[Answer], statuses: tuple[int, ...], *, streams: bool = False
) -> dict[int | str, dict[str, Any]]:
    """What a path may answer: its answer's form, and the statuses of its errors."""
    good: dict[str, Any] = {"model": model, "description": "The answer."}
    if streams:
        good["content"] = _EVENTS
    found: dict[int | str, dict[str, Any]] = {200: good}
    for status in statuses:
        found[status] = {"model": ErrorAnswer, "description": _WRONG[status]}
    return found


OF_BODIES = (400, 401, 404, 408, 413, 415)  # errors of a path that takes a body
# Path -> what it may answer, for `responses` of its route.
RESPONSES: Mapping[str, dict[int | str, dict[str, Any]]] = {
    "chat": documented(ChatAnswer, (*OF_BODIES, 500, 503), streams=True),
    "completions": documented(CompletionAnswer, (*OF_BODIES, 500, 503), streams=True),
    "render": documented(RenderAnswer, OF_BODIES),
    "tokenize": documented(TokenizeAnswer, OF_BODIES),
    "detokenize": documented(DetokenizeAnswer, OF_BODIES),
    "models": documented(ModelList, (401,)),
    "model": documented(ModelCard, (401, 404)),
}
