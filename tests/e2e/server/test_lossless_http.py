"""Speculation is lossless through HTTP: with every option the tokens are those of plain decoding."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.http_cases import BODY, CASES, CONSTRAINED, answer, shown


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
        own = figures["num_accepted_draft_tokens"] - figures["num_forced_tokens"]
        assert own > 0, "the drafter's tokens were not taken, so nothing is shown"
        assert "draft_n" not in off["timings"] or name in CONSTRAINED
    if name == "capped":
        assert figures["acceptance_histogram"][2:] == [0] * (figures["num_spec_tokens"] - 1)
    if name == "schema" and expected[0][3] == "stop":
        assert set(json.loads(expected[0][0])) == {"name", "tags"}


@pytest.mark.parametrize("name", ["seeded", "stop string", "logprobs", "samples"])
def test_streams_change_no_token(http, plain, name) -> None:
    """Chunks put together are the whole answer, however many tokens a step gave."""
    case = CASES[name]
    expected = shown(answer(plain, case))
    joined: dict[int, dict[str, Any]] = {}
    with http.stream("POST", "/v1/completions", json={**BODY, **case, "stream": True}) as stream:
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
