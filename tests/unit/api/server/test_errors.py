from __future__ import annotations

import json

import pytest
from pydantic import BaseModel, ValidationError

from paceline.api.server.bodies import parsed
from paceline.api.server.errors import (
    MAX_ERRORS,
    ApiError,
    DrainingError,
    QueueFullError,
    api_error,
    shown,
    validation_error,
)
from paceline.core.errors import (
    ConfigError,
    EngineStoppedError,
    ModelError,
    RequestError,
    TemplateError,
    quoted,
)


@pytest.mark.parametrize(
    "error,status,kind",
    [
        (RequestError("no"), 400, "invalid_request_error"),
        (TemplateError("no"), 400, "invalid_request_error"),
        (ConfigError("no"), 400, "invalid_request_error"),
        (QueueFullError("full"), 503, "service_unavailable_error"),
        (DrainingError("ends"), 503, "service_unavailable_error"),
        (EngineStoppedError("dead"), 500, "server_error"),
        (ModelError("torn"), 500, "server_error"),
        (KeyError("secret"), 500, "server_error"),
        (ApiError(404, "no"), 404, "not_found_error"),
    ],
)
def test_every_error_has_a_status(error, status, kind) -> None:
    """A client decides by status and type whether to mend, to retry or to give up."""
    found = api_error(error)
    assert (found.status, found.type) == (status, kind)
    assert set(found.body["error"]) == {"message", "type", "param", "code"}


def test_unforeseen_errors_tell_nothing_of_the_inside() -> None:
    """What a bug's message holds may be anybody's data."""
    assert "secret" not in api_error(KeyError("secret")).message


def test_waiting_is_told_in_whole_seconds() -> None:
    """Retry-After is a number of seconds, and never 0: that would be a storm."""
    assert api_error(QueueFullError("full", retry_after_s=2.6)).headers == {"Retry-After": "3"}
    assert api_error(QueueFullError("full", retry_after_s=0.1)).headers == {"Retry-After": "1"}
    assert api_error(RequestError("no")).headers == {}


class Pair(BaseModel):
    a: list[int]
    b: str


def invalid(value: object) -> ApiError:
    with pytest.raises(ValidationError) as caught:
        Pair.model_validate(value)
    return validation_error(caught.value.errors())


def test_validation_errors_are_bounded() -> None:
    """A long list of nonsense must not come back as a longer answer."""
    error = invalid({"a": ["x" * 10_000] * 50, "b": 1})
    assert error.message.count("valid integer") <= MAX_ERRORS
    assert "and 41 more" in error.message
    assert len(error.message) < 4000
    assert error.param == "a.0"


class Either(BaseModel):
    input: str | list[Pair] | bool


def test_places_name_fields_and_no_members_of_unions() -> None:
    """A client has sent `input`, and never heard of `input.str`."""
    with pytest.raises(ValidationError) as caught:
        Either.model_validate({"input": 3.5})
    error = validation_error(caught.value.errors())
    assert error.param == "input"
    assert "input.str" not in error.message
    assert "input.bool" not in error.message


def test_a_number_of_thousands_of_digits_is_told_without_pythons_advice() -> None:
    """Which is for programmers of the server."""
    with pytest.raises(ApiError, match="thousands of digits") as caught:
        parsed(b'{"a": ' + b"9" * 5000 + b"}", Pair)
    assert caught.value.status == 400
    assert "sys." not in caught.value.message


def test_values_are_shown_briefly() -> None:
    """A value tells a client what was understood; a whole document would hide it."""
    assert quoted(True) == "true"
    assert quoted(1) == "1"
    assert quoted(None) == "null"
    assert quoted([1, 2]) == "a list of 2"
    assert quoted({"a": 1}) == "an object of 1 keys"
    assert quoted(10**60) == "a very large number"
    assert len(quoted("x" * 1000)) < 250


def test_messages_hold_no_paths_and_addresses() -> None:
    """Where the server's files lie is nobody's business; its own routes are."""
    text = shown(
        "in /usr/lib/python3/site.py at 0x7f00deadbeef, see /v1/models or C:\\key.txt", 900
    )
    assert text == "in (path) at (address), see /v1/models or (path)"
    pointer = "the JSON schema uses if (at #/properties/a/items)"
    assert shown(pointer) == pointer  # a place in what the client sent itself


def test_errors_from_below_hold_no_paths_and_answers_do() -> None:
    """A model may be served under its path, and a client must be told its name."""
    assert api_error(RequestError("no /home/ada/model here")).message == "no (path) here"
    assert ApiError(404, "served: /home/ada/model").message == "served: /home/ada/model"


def test_half_characters_can_be_sent() -> None:
    """What was quoted from a request must not break the answer that quotes it."""
    error = ApiError(400, "got '\ud800'")
    assert "\\ud800" in json.dumps(error.body, ensure_ascii=False).encode().decode()
