"""Requests whose tokens must not depend on a drafter, and how an answer to one is read; no tests here."""

from __future__ import annotations

from itertools import product
from typing import Any

import httpx2

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
GRAMMAR = """
start: "the " title (" and the " title){1,3} "."
title: ("king" | "queen" | NAME) " of the " ("land" | "sea")
NAME: /[a-z]{2,4}/
"""
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
    # An answer that repeats itself, which is what an n-gram drafter can guess.
    "two ids": {"temperature": 0.7, "allowed_token_ids": [70, 71]},
    "bad words": {"temperature": 0, "bad_words": ["a", "e", "r"]},
    "min_tokens": {"temperature": 1, "min_tokens": 30, "logit_bias": {"2": 20}},
    "stop string": {"temperature": 1, "stop": ["a", "zz", "Q"]},
    "stop ids": {"temperature": 1, "stop_token_ids": list(range(40, 60))},
    "samples": {"temperature": 1, "n": 3},
    "logprobs": {"temperature": 0.5, "logprobs": 3},
    "schema": {"temperature": 1, "structured_outputs": {"json": SCHEMA}},
    "regex": {"temperature": 1, "regex": r"(king|[a-z]{3,6})( of the ([a-z]{2,4}|sea)){1,4}\."},
    "choice": {
        "temperature": 1,
        # All of them are open at each place, so that a drafter has something to say.
        "structured_outputs": {"choice": ["".join(word) for word in product("king", repeat=5)]},
    },
    "grammar": {"temperature": 1, "structured_outputs": {"grammar": GRAMMAR}},
    "json_object": {"temperature": 1, "response_format": {"type": "json_object"}},
    "capped": {"temperature": 0, "speculative": {"num_speculative_tokens": 1}},
}
# Their grammars force tokens, which are verified like drafts, with a drafter or without.
CONSTRAINED = {"schema", "regex", "choice", "grammar", "json_object"}
BODY = {"prompt": TEXT * 2, "max_tokens": 48, "seed": 11, "return_token_ids": True}


def answer(http: httpx2.Client, case: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = http.post("/v1/completions", json={**BODY, **case, **more})
    assert found.status_code == 200, found.text
    return found.json()


def shown(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    keys = ("text", "token_ids", "logprobs", "finish_reason", "stop_reason")
    return [tuple(choice[key] for key in keys) for choice in found["choices"]]


# Options that leave nothing of what a grammar allows, at the first token or at a later one.
CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "at once": {"regex": "(king|queen)", "allowed_token_ids": [97]},
    "later": {"regex": "(king|queen) of", "bad_words": ["n"], "temperature": 0},
    "choice": {"structured_outputs": {"choice": ["yes", "yeah"]}, "bad_words": ["e"]},
    "json": {"response_format": {"type": "json_object"}, "allowed_token_ids": [97]},
}


def refusal(http: httpx2.Client, case: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The error that a request ends with, which is the client's own."""
    found = http.post("/v1/completions", json={**BODY, **case, **more})
    assert found.status_code == 400, found.text
    error: dict[str, Any] = found.json()["error"]
    return error
