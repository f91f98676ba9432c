"""Structured output over a real socket: what cannot be followed is the client's to change, and is told so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.http_cases import BODY, CONTRADICTIONS, answer, refusal, shown

UNSERVED = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    "required": ["tags"],
}
SERVED = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}, "age": {"enum": [1, 2]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FILE = Path(__file__).parents[2] / "data" / "json_schemas.jsonl"
REFUSED = [case for case in map(json.loads, FILE.read_text().splitlines()) if "refused" in case]
NAMED = {"type": "json_schema", "json_schema": {"name": "thing", "schema": UNSERVED}}


@pytest.fixture(params=["server", "plain_server"])
def either(request: pytest.FixtureRequest):
    """With drafts, and without."""
    url = request.getfixturevalue(request.param).url
    with httpx2.Client(base_url=url, timeout=60) as found:
        yield found


def bodies(**fields: Any) -> dict[str, dict[str, Any]]:
    """One request as each path takes it."""
    told = [{"role": "user", "content": "hi"}]
    common = {"seed": 3, **fields}
    form = common.get("response_format")
    text = {"text": {"format": {**form, **form.get("json_schema", {})}}} if form else {}
    text.get("text", {}).get("format", {}).pop("json_schema", None)
    own = {k: v for k, v in common.items() if k != "response_format"}
    return {
        "/v1/completions": {"prompt": "hi", "max_tokens": 40, **common},
        "/v1/chat/completions": {"messages": told, "max_completion_tokens": 40, **common},
        "/v1/responses": {"input": "hi", "max_output_tokens": 40, "store": False, **own, **text},
    }


def events(http: httpx2.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All of a stream's data."""
    with http.stream("POST", path, json={**body, "stream": True}) as stream:
        assert stream.status_code == 200
        return [
            json.loads(line.removeprefix("data: "))
            for line in stream.iter_lines()
            if line.startswith("data: ") and line != "data: [DONE]"
        ]


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_options_that_a_grammar_contradicts_get_400(either, name) -> None:
    """What was asked, what is possible, what to do; on each path, as a whole and as a stream."""
    case = CONTRADICTIONS[name]
    error = refusal(either, case)
    assert (error["type"], error["code"]) == ("invalid_request_error", 400)
    asked, possible, to_do = (
        "and the grammar leave no token",
        "allows only token ids",
        "allow one",
    )
    assert all(part in error["message"] for part in (asked, possible, to_do)), error["message"]
    assert ("allowed_token_ids" in error["message"]) == ("allowed_token_ids" in case)
    assert ("bad_words" in error["message"]) == ("bad_words" in case)
    for path, body in bodies(**case).items():
        whole = either.post(path, json=body)
        assert whole.status_code == 400, (path, whole.text)
        told = whole.json()["error"]
        assert (told["type"], told["code"]) == ("invalid_request_error", 400)
        last = events(either, path, body)[-1]
        if path == "/v1/responses":
            assert last["type"] == "response.failed"
            failed = last["response"]["error"]
            assert failed == {"code": "invalid_prompt", "message": told["message"]}
        else:
            assert last["error"] == told


def test_others_of_the_batch_go_on(either) -> None:
    """An answer in the making, and samples of it, are those that come alone."""
    body = {**BODY, "temperature": 1, "n": 2, "max_tokens": 200, "ignore_eos": True}
    alone = shown(either.post("/v1/completions", json=body).json())
    texts, refusals = ["", ""], 0
    with either.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        for line in stream.iter_lines():
            if refusals < len(CONTRADICTIONS):
                refusal(either, list(CONTRADICTIONS.values())[refusals])
                refusals += 1
            if line.startswith("data: ") and line != "data: [DONE]":
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] += choice["text"]
    assert texts == [one[0] for one in alone]
    assert refusals == len(CONTRADICTIONS)


def test_a_bias_and_an_early_end_contradict_no_grammar(either) -> None:
    """A bias of -100 leaves a token possible; `min_tokens` leaves the end where nothing else is."""
    body = {"regex": "aaa", "logit_bias": {str(t): -100 for t in range(60, 80)}, "min_tokens": 20}
    [(text, ids, *_)] = shown(answer(either, body))
    assert text == "aaa"
    assert len(ids) == 4


def test_a_refused_schema_names_its_keyword(http: httpx2.Client) -> None:
    """Before the answer begins, on each path, for streams too."""
    for fields in ({"response_format": NAMED}, {"structured_outputs": {"json": UNSERVED}}):
        for path, body in bodies(**fields).items():
            for stream in (False, True):
                found = http.post(path, json={**body, "stream": stream})
                error = found.json()["error"]
                assert found.status_code == 400, path
                assert "uniqueItems (at #/properties/tags)" in error["message"]
                assert "write it without" in error["message"]
                [field] = fields
                renamed = path == "/v1/responses" and field == "response_format"
                assert error["param"].startswith("text.format" if renamed else field)


def test_the_suite_s_refused_schemas_get_400(http: httpx2.Client) -> None:
    """Each names its keyword and where that stands, and speaks of nothing that is not here."""
    for case in REFUSED:
        asked = {"name": "thing", "schema": case["schema"]}
        form = {"response_format": {"type": "json_schema", "json_schema": asked}}
        for fields in (form, {"structured_outputs": {"json": case["schema"]}}):
            error = refusal(http, fields)
            assert (error["type"], error["code"]) == ("invalid_request_error", 400)
            assert case["refused"] in error["message"]
            assert "coerce_one_of" not in error["message"]
            assert error["param"].startswith(*fields)
    assert len(REFUSED) == 20


JSON = {
    "json": {"structured_outputs": {"json": SERVED}},
    "json_object": {"structured_outputs": {"json_object": True}},
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": SERVED}}
    },
    "response_format object": {"response_format": {"type": "json_object"}},
}


@pytest.mark.parametrize("name", JSON)
def test_a_request_may_have_json_without_white_space(either, name) -> None:
    """A model that loves quotes, and blanks after them, has no others to write if the request says so."""
    quote, blank = either.post("/tokenize", json={"prompt": '" '}).json()["tokens"]
    bias = {str(quote): 100, str(blank): 90}
    texts = {}
    for said in (None, False, True):
        case = {**JSON[name], "temperature": 0, "logit_bias": bias, "max_tokens": 40}
        if said is not None:
            outputs = {**case.get("structured_outputs", {}), "disable_any_whitespace": said}
            case["structured_outputs"] = outputs
        [(texts[said], *_)] = shown(answer(either, case))
    assert texts[None] == texts[False]
    assert '" ' in texts[None]
    assert '"' in texts[True]
    assert " " not in texts[True]
    if "object" not in name:
        assert set(json.loads(texts[True])) == {"name", "age"}


def test_white_space_is_for_json_alone(http: httpx2.Client) -> None:
    """A regex says itself where it is; told, not ignored."""
    error = refusal(http, {"regex": "a b", "structured_outputs": {"disable_any_whitespace": True}})
    assert error["param"] == "structured_outputs.disable_any_whitespace"
