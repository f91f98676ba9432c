"""What request bodies have in common: strict types, bounds, fields that are refused, unknown fields.

Names, defaults and ranges are OpenAI's and vLLM's. A field that another server knows and that cannot be
honoured here is refused (`REFUSED`); a field that nobody knows is ignored, or refused where the server
is strict about it.
Not for: the requests themselves (protocol_chat.py, protocol_completions.py, protocol_tokens.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from paceline.api.chat_template import KNOWN_ROLES
from paceline.api.server.errors import bad, shown
from paceline.core.sampling_rules import MAX_BIAS

_INT64 = 1 << 63
_SHOWN = 10  # unknown fields that one message names


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


# Lists are looked through up to their first mistake: a body of nothing but mistakes would otherwise
# become an error each, minutes and gigabytes of them.
T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
# A string stands for a list of one.
Strings = Annotated[
    list[str],
    Field(fail_fast=True),
    BeforeValidator(_one_or_many),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": list(KNOWN_ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
    },
    "required": ["role"],
}
# What a message may hold is for the model's template to say, so it is checked there.
Messages = Annotated[
    list[dict[str, Any]],
    Field(fail_fast=True),
    WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1}),
]


def _few(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_BIAS:
        msg = (
            f"{len(value)} entries are too many; at most {MAX_BIAS:,} are possible; leave some out"
        )
        raise ValueError(msg)
    return value


Bias = Annotated[dict[str, float], BeforeValidator(_few)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Int64 = Annotated[int, Field(ge=-_INT64, lt=_INT64)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]


class Fields(BaseModel):
    """A JSON object of a request; null stands for a field that is not given."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(Fields):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculative(Fields):
    """How this request is speculated on; the tokens are the same whatever it says."""

    enabled: bool | None = None
    num_speculative_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    method: str | None = None


class PageFields(Fields):
    """What the page asks for beside an answer."""

    sources: bool | None = None  # which drafter each token came from
    tree: bool | None = None  # the tree of each step, in streams


class JsonSchemaFormat(Fields):
    """The schema of a `response_format`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """OpenAI's form of a structured answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Fields):
    """vLLM's form of a structured answer: one of these, or the white space of a `response_format`."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Items[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    disable_any_whitespace: bool | None = Field(
        None, description="JSON without white space between its parts; null: the server's default"
    )


_NOT_HERE = "it cannot be honoured here; leave it out"
_GUIDED = "it was removed from the interface; use structured_outputs or response_format"
_SAMPLER = "this sampler does not exist here; temperature, top_p, top_k and min_p do; leave it out"
# Field -> (values that ask for nothing, what is said about all others). Null asks for nothing too.
REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "prompt_logprobs": ((), "/v1/completions tells them with `echo` and `logprobs`; use these"),
    "prompt_embeds": ((), "prompts are text or token ids; pass `prompt`"),
    "use_beam_search": ((False,), "there is no beam search; use n for several answers"),
    "length_penalty": ((1, 1.0), "there is no beam search; leave it out"),
    "early_stopping": ((False,), "there is no beam search; leave it out"),
    "functions": (([],), "it is replaced by `tools`; use that"),
    "function_call": ((), "it is replaced by `tool_choice`; use that"),
    "modalities": ((["text"],), "text is the only modality; leave it out"),
    "audio": ((), "text is the only modality; leave it out"),
    "prediction": ((), "drafts come from the loaded drafter; leave it out"),
    "web_search_options": ((), "the server searches nothing; leave it out"),
    "store": ((False,), "answers are not stored by this path; /v1/responses stores some"),
    "priority": ((0,), "requests are served in the order they come; leave it out"),
    "verbosity": (("medium",), _NOT_HERE),
    "service_tier": (("auto", "default"), "there is one tier; leave it out"),
    "chat_template": ((), "templates come with the model or from the command line; leave it out"),
    "documents": (([],), "put them into chat_template_kwargs if the template knows them"),
    "mm_processor_kwargs": (({},), "text is the only modality; leave it out"),
    "media_io_kwargs": (({},), "text is the only modality; leave it out"),
    "logits_processors": (([],), _NOT_HERE),
    "custom_logit_processor": ((), _NOT_HERE),
    "custom_params": (({},), _NOT_HERE),
    "logprob_token_ids": (([],), "use top_logprobs for the most likely tokens"),
    "kv_transfer_params": (({},), _NOT_HERE),
    "vllm_xargs": (({},), _NOT_HERE),
    "lora_path": ((), "no adapters are served; leave it out"),
    "return_hidden_states": ((False,), _NOT_HERE),
    "thinking_token_budget": ((), _NOT_HERE),
    "repetition_detection": ((), _NOT_HERE),
    "stop_regex": (([],), "use stop (strings) or structured_outputs.regex"),
    "timings_per_token": ((False,), "timings come with the end of an answer; leave it out"),
    "speculative.n_min": ((0,), "use speculative.num_speculative_tokens for the most drafts"),
    "speculative.p_min": ((0, 0.0), "use speculative.num_speculative_tokens for the most drafts"),
    "guided_json": ((), _GUIDED),
    "guided_regex": ((), _GUIDED),
    "guided_choice": ((), _GUIDED),
    "guided_grammar": ((), _GUIDED),
    "guided_json_object": ((False,), _GUIDED),
    "guided_decoding_backend": ((), _GUIDED),
    "guided_whitespace_pattern": ((), _GUIDED),
    "structural_tag": ((), "use structured_outputs.grammar or tools"),
    "disable_any_whitespace": (
        (False,),
        "it is a field of structured_outputs; give it there",
    ),
    "disable_additional_properties": (
        (False,),
        "write additionalProperties: false into the schema; leave it out",
    ),
    "whitespace_pattern": ((), "use structured_outputs.grammar for another white space"),
    "typical_p": ((1, 1.0), _SAMPLER),
    "mirostat": ((0,), _SAMPLER),
    "dynatemp_range": ((0, 0.0), _SAMPLER),
    "xtc_probability": ((0, 0.0), _SAMPLER),
    "dry_multiplier": ((0, 0.0), _SAMPLER),
    "samplers": (([],), _SAMPLER),
    "repeat_last_n": ((-1,), "penalties see the whole text; leave it out"),
}


def check_fields(body: Fields, *, strict: bool) -> None:
    """Refuse what cannot be honoured and, where `strict`, what is unknown.

    Raises:
        ApiError: 400, naming the field.
    """
    extras = list(_extras(body, ""))
    for place, name, value in extras:
        neutral, why = REFUSED.get(name, ((value,), ""))
        if value is not None and value not in neutral:
            msg = f"{place}: {why}"
            raise bad(msg, place)
    unknown = [place for place, name, _ in extras if name not in REFUSED]
    if strict and unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        named = ", ".join(shown(place, 60) for place in unknown[:_SHOWN])
        msg = (
            f"unknown fields: {named}{more}; /openapi.json lists the known ones; leave these out, or "
            "start the server without strict fields, which ignores them"
        )
        raise bad(msg, unknown[0])


def _extras(body: Fields, prefix: str) -> Iterator[tuple[str, str, Any]]:
    """Every field that no model names: its place, its name and its value."""
    for name, value in (body.model_extra or {}).items():
        yield f"{prefix}{name}", name, value
    for name in type(body).model_fields:
        value = getattr(body, name)
        if isinstance(value, Fields):
            yield from _extras(value, f"{prefix}{name.rstrip('_')}.")


def renamed(data: object, aliases: Mapping[str, str]) -> object:
    """The body with other servers' names of a field turned into the one that is read here.

    Args:
        data: a request's JSON, before it is checked; left as it is unless it is an object.
        aliases: other name -> name; a dot in the name leads into an object.

    Raises:
        ValueError: one thing is said twice, with two values.
    """
    if not isinstance(data, dict) or not any(name in data for name in aliases):
        return data
    found = dict(data)
    for other, name in aliases.items():
        value = found.pop(other, None)
        if value is None:
            continue
        outer, _, inner = name.rpartition(".")
        inside = found.get(outer) or {}
        if outer and not isinstance(inside, dict):
            continue  # the check of types refuses it
        holder = dict(inside) if outer else found
        if holder.get(inner, value) != value:
            msg = f"{other} and {name} are one thing and have two values; give one of them"
            raise ValueError(msg)
        holder[inner] = value
        if outer:
            found[outer] = holder
    return found
