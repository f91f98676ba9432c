"""Request bodies: from bytes to a checked model, off the event loop, and their place in /openapi.json.

Bodies are read here and not by the framework: numbers that JSON does not have (NaN, Infinity, 1e999) and
numbers without end are refused wherever they stand, and a long body holds up nobody else.
Not for: how long or deep a body may be (limits.py).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from paceline.api.server.errors import bad, shown, validation_error

# A short body is read sooner than another thread wakes up beside an engine that computes, and nobody
# feels it; what a constraint may be compiled of takes a thread however short it is.
_SHORT = 4096  # bytes
_COMPILED = (
    b"response_format",
    b"structured",
    b"json_schema",
    b"regex",
    b"grammar",
    b"tool",
    b"\\u",
)

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")


class _NumberError(ValueError):
    """A number that JSON does not have, or that cannot be held."""


async def understood(request: Request, model: type[B], read: Callable[[B], T]) -> T:
    """What a request asks: its body is parsed, checked and turned into `T`, in a thread if that may take long.

    Args:
        request: its body is JSON.
        model: what the body must be.
        read: pure; may take as long as it takes to tokenize a prompt or compile a constraint.

    Raises:
        ApiError: 400, or what `read` raises.
    """
    body = await request.body()
    if len(body) <= _SHORT and not any(word in body for word in _COMPILED):
        return understand(body, model, read)
    return await asyncio.to_thread(understand, body, model, read)


def understand(body: bytes, model: type[B], read: Callable[[B], T]) -> T:
    """`understood`, from the body's bytes.

    Raises:
        ApiError: 400, or what `read` raises.
    """
    try:
        return read(parsed(body, model))
    except RecursionError as error:  # where limits.py lets such a body pass
        msg = "the body is nested deeper than it can be read; a few dozen levels are possible; send flatter JSON"
        raise bad(msg, None) from error


def parsed(body: bytes, model: type[B]) -> B:
    """A body as the model that it must be.

    Raises:
        ApiError: 400; it is not JSON, or not what the model asks for.
    """
    try:
        return model.model_validate(_json(body))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        raise validation_error([dict(entry) for entry in errors]) from error


def _json(body: bytes) -> object:
    cause: Exception
    try:
        return json.loads(body, parse_constant=_no_constant, parse_float=_float)
    except json.JSONDecodeError as error:
        why, cause = f"{error.msg} at line {error.lineno}, column {error.colno}", error
    except UnicodeDecodeError as error:
        why, cause = f"byte {error.start} is no UTF-8", error
    except RecursionError as error:
        why, cause = "it is nested too deeply", error
    except _NumberError as error:
        why, cause = str(error), error
    except ValueError as error:  # Python's, which speaks of a setting of its own
        why, cause = "a number in it has thousands of digits", error
    msg = f"the body is no JSON: {shown(why)}; send a JSON object, encoded as UTF-8"
    raise bad(msg, None) from cause


def _no_constant(name: str) -> float:
    msg = f"{name} is no number of JSON"
    raise _NumberError(msg)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        msg = f"{text[:40]} is too large a number"
        raise _NumberError(msg)
    return value


def body_schema(model: type[BaseModel], example: Mapping[str, Any]) -> dict[str, Any]:
    """What /openapi.json says about the body of a path (`openapi_extra`), with a good one."""
    schema = model.model_json_schema()
    parts = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inlined(schema, parts), "example": example}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, parts: dict[str, Any]) -> Any:
    """The schema with its parts in the places that refer to them; no part holds itself."""
    if isinstance(schema, list):
        return [_inlined(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _inlined(parts[schema["$ref"].rpartition("/")[2]] | rest, parts)
    return {key: _inlined(value, parts) for key, value in schema.items()}
