"""Bodies that nobody should send: each gets its own status, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.broken_bodies import bodies

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def message(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2}


def raw(fields: str) -> str:
    return json.dumps(message("hi"))[:-1] + "," + fields + "}"


@pytest.fixture(autouse=True)
def still_well(http: httpx2.Client):
    yield
    assert http.get("/health").status_code == 200
    assert http.post(TEXT, json={"prompt": "a", "max_tokens": 1}).status_code == 200
    load = http.get("/load").json()
    assert load["num_requests_running"] == load["num_requests_waiting"] == 0


@pytest.mark.parametrize(
    "body,status",
    [
        *((body, 400) for body in bodies(json.dumps(message("hi")))),
        (raw('"seed": ' + "9" * 30), 400),
        (raw('"temperature": "hot"'), 400),
        (raw('"messages": "hi"'), 400),
        (raw('"messages": []'), 400),
        (raw('"messages": [[]]'), 400),
        (raw('"stop": {}'), 400),
        (raw('"unknown": {"a": [1]}'), 200),
        (raw('"chat_template_kwargs": {"x": "y"}'), 200),
        (raw('"chat_template_kwargs": {"messages": 1}'), 400),
        (raw('"x": ' + "[" * 2000 + "]" * 2000), 400),
        (raw('"x": ' + '{"a":' * 2000 + "1" + "}" * 2000), 400),
        (raw('"x": ' + "[" * 60 + "]" * 60), 200),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        ('{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}', 404),
        (raw('"stop": ["\\udfff"]'), 400),
        (raw('"\\ud800": 1, "temperature": "\\ud800"'), 400),
        (raw('"user": "\\u0000"'), 200),
    ],
    ids=lambda value: value[-40:] if isinstance(value, str) else str(value),
)
def test_bodies(http: httpx2.Client, body: str, status: int) -> None:
    """Never a 500, and always an error's body."""
    found = http.post(CHAT, content=body.encode(), headers=JSON)
    assert found.status_code == status, found.text
    if status != 200:
        assert set(found.json()["error"]) == {"message", "type", "param", "code"}
        assert len(found.content) < 6000


def test_other_types_and_encodings(http: httpx2.Client) -> None:
    """JSON in UTF-8 is what is read."""
    good = json.dumps(message("hi"))
    kinds = {
        "text/plain": 415,
        "application/x-www-form-urlencoded": 415,
        "multipart/form-data": 415,
    }
    for kind, status in kinds.items():
        found = http.post(CHAT, content=good, headers={"content-type": kind})
        assert found.status_code == status
    assert http.post(CHAT, content=b'{"a": "\xff"}', headers=JSON).status_code == 400
    assert http.get(CHAT).status_code == 405
    assert http.post("/v1/nothing", json={}).status_code == 404


@pytest.mark.parametrize(
    "content,told",
    [
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}], "image_url"),
        ([{"type": "input_audio", "input_audio": {}}], "input_audio"),
        (5, "int"),
        ({"a": 1}, "content"),
    ],
)
def test_content_that_is_no_text(http: httpx2.Client, content: Any, told: str) -> None:
    """A 400 that says what was found."""
    found = http.post(CHAT, json=message(content))
    assert found.status_code == 400
    assert told in found.json()["error"]["message"]


def test_a_body_that_is_too_long(http: httpx2.Client) -> None:
    """10 MB are over the limit; what is under it and too long for the model is told so."""
    assert http.post(CHAT, json=message("a" * 10_000_000)).status_code == 413
    found = http.post(CHAT, json=message("a " * 300_000))
    assert (found.status_code, found.json()["error"]["code"]) == (400, "context_length_exceeded")
    found = http.post(TEXT, json={"prompt": list(range(100)) * 10_000})
    assert found.status_code == 400


def test_many_of_everything(http: httpx2.Client) -> None:
    """Lists are bounded, each at its own border."""
    assert http.post(TEXT, json={"prompt": "a", "max_tokens": 1, "stop": ["x"] * 100}).is_success
    assert http.post(TEXT, json={"prompt": "a", "stop": ["x"] * 257}).status_code == 400
    assert http.post(TEXT, json={"prompt": "a", "n": 129}).status_code == 400
    found = http.post(TEXT, json={"prompt": ["a"] * 10_000, "max_tokens": 1})
    assert found.status_code == 400
    bias = {str(i): 1 for i in range(2000)}
    assert http.post(TEXT, json={"prompt": "a", "logit_bias": bias}).status_code == 400


@pytest.mark.parametrize(
    "text", ["é", "日本語", "👩‍👩‍👧", "שלום", "\u202e", "e\u0301", "\x00", "a\r\n"]
)
def test_all_of_unicode_comes_back(http: httpx2.Client, text: str) -> None:
    """Through echo, and through tokens and back."""
    found = http.post(TEXT, json={"prompt": text, "echo": True, "max_tokens": 3, "temperature": 0})
    assert found.json()["choices"][0]["text"].startswith(text)
    ids = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text
    assert http.post(CHAT, json=message(text)).is_success


HALF = "\\ud800"


@pytest.mark.parametrize(
    "fields",
    [
        f'"structured_outputs": {{"regex": "{HALF}"}}',
        f'"structured_outputs": {{"choice": ["a", "{HALF}"]}}',
        f'"structured_outputs": {{"grammar": "start: \\"{HALF}\\""}}',
        f'"structured_outputs": {{"json": {{"const": "{HALF}"}}}}',
        f'"structured_outputs": {{"json": {{"required": ["{HALF}"]}}}}',
        f'"structured_outputs": {{"json": "{{\\"const\\": \\"\\{HALF}\\"}}"}}',
        f'"structured_outputs": {{"json": {{"{HALF}": 1}}}}',
        '"structured_outputs": {"json": {"minimum": 1' + "0" * 309 + "}}",
        (
            '"tools": [{"type": "function", "function": {"name": "f", "parameters": '
            f'{{"type": "object", "description": "{HALF}"}}}}}}], "tool_choice": "required"'
        ),
        f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {{"enum": ["{HALF}"]}}}}}}',
    ],
)
def test_constraints_that_no_text_fits(http: httpx2.Client, fields: str) -> None:
    """What an answer could never hold, or its grammar not read, is refused and not tried."""
    found = http.post(CHAT, content=raw(fields).encode(), headers=JSON)
    assert found.status_code == 400, found.text
    assert found.json()["error"]["param"]
