"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, model_validator

from paceline.api.server.protocol import renamed
from paceline.api.server.protocol_sampling import SamplingFields
from paceline.core.sampling_rules import MAX_TOP_LOGPROBS

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string"}
# Text, texts, token ids, or lists of token ids; completions.py tells them apart.
PROMPT_SCHEMA = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
# Chat's name of a field; load generators send both to either path.
CHATS_NAMES = {"max_completion_tokens": "max_tokens"}
Prompts = Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)]


class CompletionRequest(SamplingFields):
    """Prompts to be continued."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None  # 0: only with `echo`
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1)
    add_special_tokens: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _chats_names(cls, data: object) -> object:
        return renamed(data, CHATS_NAMES)
