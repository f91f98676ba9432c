"""Speculation is lossless through HTTP: with every option the tokens are those of plain decoding."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

TEXT = "the king of the land and the king of the sea: "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 4},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1},
    "hot": {"temperature": 2, "top_p": 0.9},
    "top_k": {"temperature": 1, "top_k": 4},
    "min_p": {"temperature": 1, "min_p": 0.2},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    },
    "bias": {"temperature": 0.5, "logit_bias": {"70": 3, "71": -100, "90": 2.5}},
    "allowed": {"temperature": 1, "allowed_token_ids": list(range(60, 90))},
    "bad words": {"temperature": 0, "bad_words": ["a", "e", "r"]},
    "min_tokens": {"temperature": 1, "min_tokens": 30, "logit_bias": {"2": 20}},
    "stop string": {"temperature": 1, "stop": ["a", "zz", "Q"]},
    "stop ids": {"temperature": 1, "stop_token_ids": list(range(40, 60))},
    "samples": {"temperature": 1, "n": 3},
    "logprobs": {"temperature": 0.5, "logprobs": 3},
    "schema": {"temperature": 1, "structured_outputs": {"json": SCHEMA}},
    "regex": {"temperature": 1, "regex": r"(king|queen)( of the (land|sea)){1,4}\."},
    "capped": {"temperature": 0, "speculative": {"num_speculative_tokens": 1}},
}


def answer(http: httpx2.Client, case: dict[str, Any], **more: Any) -> dict[str, Any]:
    body = {"prompt": TEXT * 2, "max_tokens": 48, "seed": 11, "return_token_ids": True}
    found = http.post("/v1/completions", json={**body, **case, **more})
    assert found.status_code == 200, found.text
    return found.json()


def shown(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    keys = ("text", "token_ids", "logprobs", "finish_reason", "stop_reason")
    return [tuple(choice[key] for key in keys) for choice in found["choices"]]


@pytest.fixture
def plain(plain_server):
    with httpx2.Client(base_url=plain_server.url, timeout=60) as found:
        yield found


@pytest.mark.parametrize("name", CASES)
def test_drafts_change_no_token(http, plain, name) -> None:
    """The same ids, text, log-probabilities and reason, with drafts, switched off, and without."""
    case = CASES[name]
    expected = shown(answer(plain, {k: v for k, v in case.items() if k != "speculative"}))
    off = answer(http, case, speculative={"enabled": False})
    assert shown(off) == expected
    drafted = [answer(http, case) for _ in range(2)]  # the second time it has learned
    assert [shown(one) for one in drafted] == [expected, expected]
    if case.get("n", 1) == 1:
        figures = drafted[1]["metrics"]["speculative_decoding"]
        assert figures["num_accepted_draft_tokens"] > 0, "nothing was drafted, so nothing is shown"
        assert "draft_n" not in off["timings"] or "structured" in str(case) or "regex" in case
    if name == "capped":
        assert figures["acceptance_histogram"][2:] == [0] * (figures["num_spec_tokens"] - 1)
    if name == "schema" and expected[0][3] == "stop":
        assert set(json.loads(expected[0][0])) == {"name", "tags"}


@pytest.mark.parametrize("name", ["seeded", "stop string", "logprobs", "samples"])
def test_streams_change_no_token(http, plain, name) -> None:
    """Chunks put together are the whole answer, however many tokens a step gave."""
    case = CASES[name]
    expected = shown(answer(plain, case))
    body = {"prompt": TEXT * 2, "max_tokens": 48, "seed": 11, "return_token_ids": True}
    joined: dict[int, dict[str, Any]] = {}
    with http.stream("POST", "/v1/completions", json={**body, **case, "stream": True}) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                own = joined.setdefault(choice["index"], {"text": "", "token_ids": []})
                own["text"] += choice["text"]
                own["token_ids"] += choice["token_ids"]
                own["finish_reason"] = choice["finish_reason"]
    for index, (text, ids, _, reason, _) in enumerate(expected):
        assert joined[index] == {"text": text, "token_ids": ids, "finish_reason": reason}
