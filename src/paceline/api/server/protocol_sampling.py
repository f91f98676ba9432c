"""The sampling options that chat and completions share, as fields of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from paceline.api.server.protocol import (
    Bias,
    Count,
    Fields,
    Int64,
    Items,
    PageFields,
    ResponseFormat,
    Speculative,
    StreamOptions,
    Strings,
    StructuredOutputs,
    TokenId,
    renamed,
)
from paceline.core.sampling_rules import MAX_SAMPLES, MAX_STOPS

# What SGLang, llama.cpp and others call these fields.
ALIASES: Mapping[str, str] = {
    "no_stop_trim": "include_stop_str_in_output",
    "rid": "request_id",
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",
    "json_schema": "structured_outputs.json",
    "speculative.n_max": "speculative.num_speculative_tokens",
}


class SamplingFields(Fields):
    """How answers are sampled, cut and constrained; null is the default of each."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31, description="0 or -1: off")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=1e-6, le=1e6)
    logit_bias: Bias | None = Field(None, description="token id -> -100 ... 100")
    seed: Int64 | None = None
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    stop: Strings | None = Field(None, max_length=MAX_STOPS)
    stop_token_ids: Items[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    allowed_token_ids: Items[TokenId] | None = None
    bad_words: Items[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, lt=1 << 31, description="keep the prompt's last tokens; -1: what fits"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    speculative: Speculative | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    cache_prompt: bool | None = None
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    paceline: PageFields | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("n_predict") == -1:  # llama.cpp: without a limit
            data = {name: value for name, value in data.items() if name != "n_predict"}
        return renamed(data, ALIASES)

    @property
    def streams(self) -> bool:
        """Whether the answer is to come bit by bit."""
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def wants_sources(self) -> bool:
        """Whether tokens are told with where they came from."""
        return bool(self.paceline and self.paceline.sources)

    @property
    def wants_trees(self) -> bool:
        """Whether chunks carry the trees that were verified."""
        return bool(self.paceline and self.paceline.tree)
