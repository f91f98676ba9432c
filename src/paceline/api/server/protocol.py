"""What request bodies have in common: strict types, bounds, parts, other servers' names of fields.

Names, defaults and ranges are OpenAI's and vLLM's.
Not for: the requests themselves (protocol_chat.py, protocol_completions.py, protocol_tokens.py), and
fields that none of them has (protocol_refused.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from paceline.api.chat_template import KNOWN_ROLES
from paceline.core.sampling_rules import MAX_BIAS

_INT64 = 1 << 63


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
    """OpenAI's form of a structured answer, and llama.cpp's, which has its schema not in `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


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


def same(value: object, other: object) -> bool:
    """Whether two values of JSON are one; numbers are by what they count, and `true` is no 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


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
        before = holder.get(inner)
        if before is not None and not same(before, value):
            msg = f"{other} and {name} are one thing and have two values; give one of them"
            raise ValueError(msg)
        holder[inner] = value
        if outer:
            found[outer] = holder
    return found
