"""schemathesis asks what /openapi.json allows, and what it does not: there is no 500."""

from __future__ import annotations

from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from paceline.api.server.protocol_chat import ChatRequest
from paceline.api.server.protocol_completions import CompletionRequest

OPERATIONS = (
    ("/v1/chat/completions", "POST"),
    ("/v1/chat/completions/render", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/responses", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/models/{name}", "GET"),
)
EXAMPLES = 25
CHECKS = [  # answers are what /openapi.json says of them, errors too
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
FIELDS = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
OPTIONAL = sorted(FIELDS - {"messages", "prompt"})
SHORT = {
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/completions": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
}


@pytest.fixture(scope="session")
def api(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize(
    "path,method,mode",
    [
        (path, method, mode)
        for path, method in OPERATIONS
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        if method == "POST" or mode.is_positive  # a path that is text cannot be wrong
    ],
)
def test_no_body_breaks_the_server(api, path, method, mode) -> None:
    """Bounded: a few dozen bodies per path and mode, the same in every run."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=api[path][method].as_strategy(generation_mode=mode),
        kept=st.sets(st.sampled_from(OPTIONAL), max_size=6),
    )
    def ask(case, kept) -> None:
        if isinstance(case.body, dict) and mode.is_positive:
            # With all fields at once something is always wrong, and long answers show nothing.
            body = {k: v for k, v in case.body.items() if k not in OPTIONAL or k in kept}
            few = {"n": min(body["n"], 2)} if body.get("n") else {}
            case.body = body | few | SHORT.get(path, {})
        response = case.call(timeout=60)
        case.validate_response(response, checks=CHECKS)
        statuses[response.status_code] += 1

    ask()
    assert set(statuses) <= {200, 400, 404}
    if path.endswith("completions") and mode.is_positive:
        assert statuses[200], "no body was good, so nothing behind the checks was asked"
