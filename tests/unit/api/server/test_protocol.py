from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.api.server.bodies import body_schema, parsed, understand
from paceline.api.server.protocol_chat import ChatRequest
from paceline.api.server.protocol_completions import CompletionRequest
from paceline.api.server.protocol_refused import REFUSED, check_fields
from paceline.api.server.protocol_tokens import DetokenizeRequest, TokenizeRequest
from tests.broken_bodies import NO_OBJECT, NO_VALUE
from tests.served import context, refusal

CHAT = b'{"messages": [{"role": "user", "content": "hi"}], %s}'


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})


@pytest.mark.parametrize(
    "body,field",
    [
        (b'"temperature": 2.1', "temperature"),
        (b'"temperature": "1"', "temperature"),
        (b'"temperature": -0.1', "temperature"),
        (b'"top_p": 0', "top_p"),
        (b'"top_p": 1.01', "top_p"),
        (b'"top_k": -2', "top_k"),
        (b'"top_k": 1.5', "top_k"),
        (b'"min_p": -0.1', "min_p"),
        (b'"presence_penalty": 2.5', "presence_penalty"),
        (b'"frequency_penalty": -2.5', "frequency_penalty"),
        (b'"repetition_penalty": 0', "repetition_penalty"),
        (b'"max_tokens": 0', "max_tokens"),
        (b'"max_completion_tokens": 0', "max_completion_tokens"),
        (b'"min_tokens": -1', "min_tokens"),
        (b'"n": 0', "n"),
        (b'"n": true', "n"),
        (b'"n": 129', "n"),
        (b'"seed": 9223372036854775808', "seed"),
        (b'"seed": 1.5', "seed"),
        (b'"stop": 3', "stop"),
        (b'"stop": ["a", 3]', "stop.1"),
        (b'"stop_token_ids": [-1]', "stop_token_ids.0"),
        (b'"logit_bias": {"5": "x"}', "logit_bias.5"),
        (b'"logprobs": 3', "logprobs"),
        (b'"top_logprobs": 21', "top_logprobs"),
        (b'"stream": "yes"', "stream"),
        (b'"ignore_eos": 1', "ignore_eos"),
        (b'"cache_salt": ""', "cache_salt"),
        (b'"request_id": "a b"', "request_id"),
        (b'"response_format": {"type": "yaml"}', "response_format.type"),
        (b'"speculative": {"num_speculative_tokens": -1}', "speculative.num_speculative_tokens"),
        (b'"speculative": true', "speculative"),
        (b'"tools": {}', "tools"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(body, field) -> None:
    """Nothing is rounded, clipped or turned into another type in silence."""
    error = refusal(parsed, CHAT % body, ChatRequest)
    assert (error.status, error.param) == (400, field)
    assert field in error.message


@pytest.mark.parametrize(
    "body,told",
    [
        *((body.encode(), told) for body, told in NO_OBJECT.items()),
        *((CHAT % field.encode(), told) for field, told in NO_VALUE.items()),
        (b'{"a": "\xff"}', "UTF-8"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_json_object_is_refused(body, told) -> None:
    """Broken bodies are the client's mistake, wherever in them the mistake is."""
    error = refusal(parsed, body, ChatRequest)
    assert error.status == 400
    assert told in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": ["x"] * 300_000},
        {"stop": [1] * 300_000},
        {"messages": [1] * 300_000},
        {"tools": [1] * 300_000},
        {"bad_words": [1] * 300_000},
        {"structured_outputs": {"choice": [1] * 300_000}},
        {"logit_bias": {str(i): "x" for i in range(100_000)}},
    ],
)
def test_a_body_of_mistakes_is_refused_at_the_first(fields) -> None:
    """An error for each of a million mistakes took half a minute and two gigabytes."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()
    message = refusal(parsed, body, ChatRequest).message
    assert len(message) < 300
    assert "more" not in message


def test_what_is_too_deep_for_its_reader_is_the_clients_mistake() -> None:
    """Messages are rebuilt by recursion; a limit that lets them pass must not make it a 500."""
    from functools import partial

    from paceline.api.server import chat as chats

    deep = b'"chat_template_kwargs": {"x": ' + b"[" * 900 + b"]" * 900 + b"}"
    error = refusal(understand, CHAT % deep, ChatRequest, partial(chats.read, context=context()))
    assert (error.status, "nested" in error.message) == (400, True)


def test_null_stands_for_nothing() -> None:
    """Clients write null for what they leave out."""
    names = set(ChatRequest.model_fields) - {"messages"}
    found = chat(**dict.fromkeys(names))
    assert all(getattr(found, name) is None for name in names)


def test_unknown_fields_are_ignored_unless_strict() -> None:
    """Clients of other servers send fields of theirs; a test wants to know about its own mistakes."""
    body = chat(temprature=1, speculative={"methd": "x"})
    check_fields(body, strict=False)
    error = refusal(check_fields, body, strict=True)
    assert "temprature, speculative.methd" in error.message
    assert error.param == "temprature"


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_what_cannot_be_honoured_is_refused(field) -> None:
    """An option that another server honours must not be dropped in silence here."""
    neutral, _ = REFUSED[field]
    for value in (None, *neutral):
        check_fields(chat(**{field: value}), strict=True)
    numbers = [bool(value) for value in neutral if type(value) is int and value in {0, 1}]
    for value in ("\x00 nothing neutral", *numbers):  # `true` is no 1, and `false` no 0
        error = refusal(check_fields, chat(**{field: value}), strict=False)
        assert (error.status, error.param) == (400, field)


def test_other_servers_names_mean_the_same() -> None:
    """SGLang's and llama.cpp's names of a field are read as the field."""
    body = chat(
        n_predict=7,
        repeat_penalty=1.5,
        no_stop_trim=True,
        rid="r",
        min_new_tokens=2,
        stop_sequences=["x"],
        regex="a+",
        **{"speculative.n_max": 3},
    )
    assert body.max_tokens == 7
    assert body.repetition_penalty == 1.5
    assert body.include_stop_str_in_output
    assert body.request_id == "r"
    assert (body.min_tokens, body.stop) == (2, ["x"])
    assert chat(max_new_tokens=7, max_tokens=None).max_tokens == 7
    assert body.structured_outputs.regex == "a+"
    assert body.speculative.num_speculative_tokens == 3
    assert chat(n_predict=-1).max_tokens is None  # llama.cpp: no limit
    assert chat(json_schema={"type": "object"}).structured_outputs.json_ == {"type": "object"}


@pytest.mark.parametrize(
    "fields",
    [
        b'"n_predict": 7, "max_tokens": 8',
        b'"n_predict": 1, "max_tokens": true',
        b'"ebnf": "a", "grammar": "b"',
        b'"regex": "a", "structured_outputs": 5',
        b'"regex": "a", "structured_outputs": [5]',
        b'"speculative.n_max": 1, "speculative": "x"',
    ],
)
def test_one_thing_said_twice_is_refused(fields) -> None:
    """Of two values for one thing neither may win in silence, and no shape may crash the reading."""
    assert refusal(parsed, CHAT % fields, ChatRequest).status == 400


def test_one_stop_string_is_a_list_of_one() -> None:
    """OpenAI allows both."""
    assert chat(stop="x").stop == ["x"]
    assert chat(stop=["x", "y"]).stop == ["x", "y"]


def test_llama_cpps_names_of_tokenize_are_read() -> None:
    """Its clients say content."""
    body = TokenizeRequest.model_validate({"content": "a", "add_special": False})
    assert (body.prompt, body.add_special_tokens) == ("a", False)


@pytest.mark.parametrize(
    "model", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
)
def test_schemas_stand_alone(model) -> None:
    """/openapi.json embeds them, where references into another document would lead nowhere."""
    found = body_schema(model, {})
    assert "$ref" not in str(found)
    schema = found["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == {
        field.alias or name for name, field in model.model_fields.items()
    }
