"""Clients that leave: each of their answers ends once in the metrics, whenever and from wherever they went."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.local_server import (
    ENDLESS,
    LocalServer,
    body,
    local_server,
    post,
    slowly,
    until,
    wait_for,
)
from tests.unit.api.server.test_metrics import samples

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
HELLO = [{"role": "user", "content": "hi"}]
ASKED = {
    "/v1/completions": body(max_tokens=ENDLESS),
    CHAT: {"messages": HELLO, "max_tokens": ENDLESS},
    RESPONSES: {"input": "hi", "max_output_tokens": ENDLESS},
}
EACH = ("e2e_request_latency_seconds", "request_generation_tokens", "request_prompt_tokens")


class Gated:
    """A server whose engine steps only while its gate is open, and what it counts."""

    def __init__(self, server: LocalServer) -> None:
        self.server = server

    def ends(self) -> dict[str, float]:
        """Ended answers by their reason, those of no reason left out; each histogram has as many."""
        found = samples(self.server.metrics.render({}).decode())
        start = "paceline:request_success_total,finished_reason="
        ends = {k.removeprefix(start): v for k, v in found.items() if k.startswith(start) and v}
        for name in EACH:
            assert found[f"paceline:{name}_count"] == sum(ends.values()), name
        return ends

    def settled(self) -> dict[str, float]:
        """The same, once nothing is open."""
        self.server.gate.open()
        self.server.settle()
        return self.server.on_events(self.ends)


@pytest.fixture
def gated() -> Iterator[Gated]:
    with local_server(max_len=10**6, on_step=slowly) as server:
        yield Gated(server)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(ASKED))
def test_before_the_first_token(gated: Gated, path: str, stream: bool) -> None:
    """The request waits for its row, or its prompt is computed; nothing was said yet."""
    gated.server.gate.close()
    with gated.server.raw() as connection:
        connection.sendall(post({**ASKED[path], "stream": stream}, path))
        wait_for(lambda: gated.server.engine.added)
    wait_for(lambda: gated.server.service.admission.num_open == 0)
    assert gated.settled() == {"abort": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(ASKED))
def test_while_tokens_come(gated: Gated, path: str, stream: bool) -> None:
    """In the middle of an answer."""
    with gated.server.raw() as connection:
        connection.sendall(post({**ASKED[path], "stream": stream}, path))
        wait_for(lambda: gated.server.engine.num_steps > 5)
    wait_for(lambda: gated.server.service.admission.num_open == 0)
    assert gated.settled() == {"abort": 1}


def test_with_some_answers_whole(gated: Gated) -> None:
    """Of four samples none is counted twice: what had ended has, the rest is aborted."""
    server = gated.server
    kept = body(max_tokens=3, n=2, stream=True)
    with server.client() as client:
        assert client.post("/v1/completions", json=kept).status_code == 200
    with server.raw() as connection:
        connection.sendall(post(body(max_tokens=ENDLESS, n=4, stream=True)))
        wait_for(lambda: server.engine.num_steps > 9)
    wait_for(lambda: server.service.admission.num_open == 0)
    assert gated.settled() == {"length": 2, "abort": 4}


@pytest.mark.parametrize("stream", [False, True])
def test_after_the_last_token(gated: Gated, stream: bool) -> None:
    """The answer is there, and its reader goes with it."""
    with gated.server.raw() as connection:
        connection.sendall(post(body(max_tokens=5, stream=stream)))
        until(connection, b'"finish_reason":"length"')
    assert gated.settled() == {"length": 1}


def test_what_is_refused_is_no_answer(gated: Gated) -> None:
    """It was never begun."""
    with gated.server.client() as client:
        told = client.post("/v1/completions", json=body(prompt=["the end", ""]))
        assert told.status_code == 400
    assert gated.settled() == {}
