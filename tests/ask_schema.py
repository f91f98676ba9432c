"""`python -m tests.ask_schema URL MODE`: ask a server what its /openapi.json allows, or what it does not; no tests here.

In a process of its own, because hypothesis draws what it finds in imported modules too, and sets of text come in
another order in every process that does not fix it: here the same requests are drawn in every run. Writes a JSON
object: operation -> {"statuses": {status: count}, "failure": text or null}.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx2
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

CHECKS = [  # answers are what /openapi.json says of them, errors too
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
EXAMPLES = 25  # of an operation with a body
FEW = 6  # of one without
NEEDED = {"messages", "prompt", "input", "tokens"}
SHORT = {
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/completions": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
}


class Server:
    """What the server has, for paths that name something."""

    def __init__(self, url: str) -> None:
        self._http = httpx2.Client(base_url=url, timeout=120)
        self._streams: list[Any] = []

    def model(self) -> str:
        return str(self._http.get("/v1/models").json()["data"][0]["id"])

    def made(self) -> str:
        """The id of a response that is whole."""
        body = {"input": "the end", "max_output_tokens": 2}
        return str(self._http.post("/v1/responses", json=body).json()["id"])

    def in_the_making(self) -> str:
        """The id of one that would go on for minutes."""
        body = {"input": "x", "max_output_tokens": 60_000, "ignore_eos": True, "stream": True}
        stream = self._http.stream("POST", "/v1/responses", json=body)
        lines = stream.__enter__().iter_lines()
        self._streams.append((stream, lines))
        first = next(line for line in lines if line.startswith("data: "))
        return str(json.loads(first[6:])["response"]["id"])

    def close(self) -> None:
        for stream, lines in self._streams:
            lines.close()
            stream.__exit__(None, None, None)
        self._http.close()


def named(server: Server, method: str, path: str) -> Callable[[], dict[str, str]] | None:
    """What a path's parameter may be, where any text would hardly ever name a thing."""
    if path == "/v1/models/{name}":
        return lambda: {"name": server.model()}
    if path.endswith("/cancel"):
        return lambda: {"response_id": server.in_the_making()}
    return (lambda: {"response_id": server.made()}) if "{response_id}" in path else None


def ask(operation: Any, mode: GenerationMode, server: Server) -> dict[str, int]:
    """Ask one operation; the counts of its statuses.

    Raises:
        Exception: a check failed.
    """
    statuses: Counter[int] = Counter()
    has_body = bool(operation.body)
    found = named(server, operation.method, operation.path)

    @settings(
        max_examples=EXAMPLES if has_body else FEW,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def called(case: Any, data: Any) -> None:
        if isinstance(case.body, dict) and mode.is_positive:
            # With all fields at once something is always wrong, and long answers show nothing.
            optional = sorted(set(case.body) - NEEDED)
            kept = data.draw(st.sets(st.sampled_from(optional), max_size=6)) if optional else ()
            body = {k: v for k, v in case.body.items() if k in NEEDED or k in kept}
            few = {"n": min(body["n"], 2)} if body.get("n") else {}
            case.body = body | few | SHORT.get(operation.path, {})
        if found is not None and mode.is_positive and statuses.total() % 2 == 0:
            case.path_parameters = found()
        response = case.call(timeout=120)
        case.validate_response(response, checks=CHECKS)
        statuses[response.status_code] += 1

    called()
    return dict(statuses)


def main(url: str, mode_name: str) -> None:
    mode = GenerationMode(mode_name)
    server = Server(url)
    report = {}
    for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = result.ok()
        if not mode.is_positive and not (operation.body or operation.query):
            continue  # nothing there can be wrong: a path's parameter may be any text
        label = f"{operation.method.upper()} {operation.path}"
        report[label] = {"statuses": {}, "failure": None}
        try:
            report[label]["statuses"] = ask(operation, mode, server)
        except (Exception, BaseExceptionGroup):  # noqa: BLE001 (it is told, and the others are asked)
            report[label]["failure"] = traceback.format_exc()
    server.close()
    print(json.dumps(report))  # noqa: T201 (the test reads it)


if __name__ == "__main__":
    main(*sys.argv[1:])
