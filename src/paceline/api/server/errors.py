"""ApiError: what a client is told when something is wrong, and how the package's errors become one.

The body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`. `code` is OpenAI's name where
it has one ("context_length_exceeded", "model_not_found"), else the HTTP status as a number, which is
what vLLM answers. Messages are bounded and always valid UTF-8, as they quote what came from outside;
those of errors from below hold no paths.
Not for: which errors there are below the server (core/errors.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import (
    ConfigError,
    EngineStoppedError,
    PacelineError,
    RequestError,
    quoted,
)

INVALID = "invalid_request_error"
SERVER = "server_error"
UNAVAILABLE = "service_unavailable_error"
# HTTP status -> OpenAI's `type` of error.
TYPES: Mapping[int, str] = {
    400: INVALID,
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: INVALID,
    408: "timeout_error",
    413: INVALID,
    415: INVALID,
    429: "rate_limit_error",
    500: SERVER,
    501: "not_implemented_error",
    503: UNAVAILABLE,
}
MAX_ERRORS = 10  # of one request that are told
MAX_VALUE = 200  # characters of a value that is quoted
MAX_MESSAGE = 4000  # characters of a message as a whole
# Not a JSON pointer, which leads into what the client sent itself.
_PATH = re.compile(r"(?<![\w:/.#])(?!/v1/)(?:/[\w.@+-]+){2,}/?|\b[A-Za-z]:\\[^\s'\"]+")
# What pydantic calls a member of a union in the place of an error.
_MEMBERS = frozenset(
    ("str", "bool", "int", "float", "dict", "list", "constrained-str", "constrained-int")
)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


class ApiError(Exception):
    """An answer other than 2xx.

    Args:
        status: HTTP status.
        message: what was asked, what is possible, what to do.
        type: OpenAI's kind of error; None: the usual one of the status.
        code: OpenAI's name of the error; None: the status.
        param: the field at fault, where one is.
        retry_after_s: tell the client to come back after so many seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,  # noqa: A002 (the wire's name)
        code: str | int | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.status = status
        self.message = _cut(message, MAX_MESSAGE)
        self.type = type or TYPES.get(status, SERVER if status >= 500 else INVALID)
        self.code: str | int = status if code is None else code
        self.param = param
        self.retry_after_s = retry_after_s
        super().__init__(self.message)

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with the answer."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, round(self.retry_after_s)))}


class UnavailableError(PacelineError):
    """The server cannot take a request now; it may later.

    Attributes:
        retry_after_s: when to ask again, in seconds.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFullError(UnavailableError):
    """As many requests wait as may."""


class DrainingError(UnavailableError):
    """The server ends: it takes no more requests."""


def bad(message: str, param: str | None, *, code: str | None = None) -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: Exception, *, param: str | None = None) -> ApiError:
    """What a client is told about an error; whatever is not foreseen is a 500 without details.

    Args:
        error: anything that was raised while a request was served.
        param: the field at fault, where the caller knows it.
    """
    told = shown(str(error), MAX_MESSAGE)
    match error:
        case ApiError():
            return error
        case UnavailableError():
            return ApiError(503, told, retry_after_s=error.retry_after_s)
        case EngineStoppedError():
            return ApiError(500, told, code="engine_stopped")
        case RequestError() | ConfigError():  # TemplateError and ConstraintError are RequestErrors
            return ApiError(400, told, param=param)
        case PacelineError():
            return ApiError(500, told)
        case _:
            return ApiError(
                500,
                f"the server failed on this request ({type(error).__name__}); its log says more; "
                "the request may be sent again",
            )


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """A 400 from pydantic's list of errors: the first ten, each value shortened.

    Args:
        errors: as `ValidationError.errors()` gives them; `loc` may begin with "body".
    """
    told = [_clause(error) for error in errors[:MAX_ERRORS]]
    left = len(errors) - len(told)
    message = "; ".join(told) + (f"; and {left} more" if left > 0 else "")
    param = _place(errors[0]) if errors else None
    return ApiError(400, message or "the request is not valid", param=param or None)


def shown(text: str, most: int = MAX_VALUE) -> str:
    """Text from outside, made fit for a message: valid UTF-8, no paths or addresses, not too long."""
    return _ADDRESS.sub("(address)", _PATH.sub("(path)", _cut(text, most)))


def _cut(text: str, most: int) -> str:
    if len(text) > most:
        text = text[: most - 3] + "..."
    return text.encode("utf-8", "backslashreplace").decode()


def _clause(error: Mapping[str, Any]) -> str:
    place = _place(error) or "the body"
    told = str(error.get("msg", "not valid")).removeprefix("Value error, ")
    text = f"{place}: {shown(told)}"
    if error.get("type") == "missing" or "input" not in error:
        return text
    return f"{text}, got {quoted(error['input'])}"


def _place(error: Mapping[str, Any]) -> str:
    """Where an error is: "messages.0.role", without "body" and without names of types."""
    loc = [part for part in error.get("loc", ()) if part != "body"]
    # A union's member appears in the place as the name of its type: of no use to a client.
    parts = [str(part) for part in loc if "[" not in str(part) and part not in _MEMBERS]
    return shown(".".join(parts), 100)
