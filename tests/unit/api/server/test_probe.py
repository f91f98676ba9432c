"""/health_generate: a token is made, or it is said why not."""

from __future__ import annotations

from paceline.api.server.settings import ServerSettings
from tests.local_server import ENDLESS, body, local_server, slowly


def test_the_probe_lets_the_engine_make_one_token() -> None:
    """In a scope of its own, without drafts, and with nothing left behind."""
    with local_server() as server, server.client() as client:
        answer = client.get("/health_generate")
        assert (answer.status_code, answer.content) == (200, b"")
        (asked,) = server.engine.added
        assert (asked.params.max_tokens, asked.params.num_speculative_tokens) == (1, 0)
        assert asked.params.ignore_eos
        assert asked.scope == "probe"
        assert len(asked.prompt_ids) == 1
        server.settle()
        assert client.get("/metrics").text.count('request_success_total{engine="0"') >= 1


def test_an_engine_that_hangs_is_found_out() -> None:
    """While /health, which asks nothing of it, still waits for the watchdog; the token is called off."""
    settings = ServerSettings(served_model_name=("tiny",), health_generate_timeout=0.1)
    with (
        local_server(settings=settings) as server,
        server.client() as client,
    ):
        server.gate.close()
        answer = client.get("/health_generate")
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert "no token within 0.1 s, beside 0 answers" in answer.json()["error"]["message"]
        assert client.get("/health").status_code == 200
        server.gate.open()
        server.settle()


def test_a_full_house_and_a_server_that_ends_say_so() -> None:
    """The probe meets what a request would meet."""
    settings = ServerSettings(served_model_name=("tiny",), max_queued_requests=0)
    with (
        local_server(settings=settings, max_rows=1, max_len=10**6, on_step=slowly) as server,
        server.client() as client,
    ):
        with client.stream("POST", "/v1/completions", json=body(max_tokens=ENDLESS, stream=True)):
            full = client.get("/health_generate")
            assert (full.status_code, full.headers["retry-after"] != "") == (503, True)
        server.settle()
        assert client.get("/health_generate").status_code == 200
        server.on_events(server.service.stop_admitting)
        ending = client.get("/health_generate")
        assert ending.status_code == 503
        assert "shutting down" in ending.json()["error"]["message"]


def test_an_engine_that_has_died_is_no_healthy_one() -> None:
    """Its loop's end is told, not waited for."""

    def step(_: int) -> None:
        msg = "the machine is on fire"
        raise RuntimeError(msg)

    with local_server(on_step=step) as server, server.client() as client:
        for _ in range(2):
            answer = client.get("/health_generate")
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "server_error"
