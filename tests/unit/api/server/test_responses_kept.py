"""Responses that are asked for by their id: in the making, forgotten, and their items page by page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from paceline.api.server.errors import ApiError
from paceline.api.server.responses_page import page
from paceline.api.server.settings import ServerSettings
from tests.local_server import ENDLESS, LocalServer, local_server

PATH = "/v1/responses"
ITEMS = [{"id": name} for name in "abcde"]


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    settings = ServerSettings(served_model_name=("tiny",), api_key=("one", "two"))
    with local_server(settings=settings, max_len=2 * ENDLESS) as found:
        yield found


@pytest.fixture
def client(server: LocalServer) -> Iterator[httpx2.Client]:
    with server.client(headers={"authorization": "Bearer one"}) as found:
        yield found


@contextmanager
def in_the_making(server: LocalServer, client: httpx2.Client) -> Iterator[tuple[str, Any]]:
    """A response that stands still until the gate is opened: its id, and the rest of its events."""
    fields = {"input": "hi", "stream": True, "max_output_tokens": ENDLESS}
    server.gate.close()
    try:
        with client.stream("POST", PATH, json=fields) as answer:
            assert answer.status_code == 200
            lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
            events = map(json.loads, lines)
            yield next(events)["response"]["id"], events
    finally:
        server.gate.open()
    server.settle()


def refused(answer: httpx2.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def test_a_response_in_the_making_can_be_forgotten(
    server: LocalServer, client: httpx2.Client
) -> None:
    """It is called off at once, and nothing of it is kept; only its own key can do it."""
    with in_the_making(server, client) as (made, events):
        other = {"authorization": "Bearer two"}
        refused(client.delete(f"{PATH}/{made}", headers=other), 404)
        assert client.get(f"{PATH}/{made}").json()["status"] == "in_progress"
        told = client.delete(f"{PATH}/{made}")
        assert (told.status_code, told.json()["deleted"]) == (200, True)
        refused(client.get(f"{PATH}/{made}"), 404)
        refused(client.delete(f"{PATH}/{made}"), 404)
        server.gate.open()
        *_, last = events
        assert last["response"]["status"] == "cancelled"
    refused(client.get(f"{PATH}/{made}"), 404)


def test_a_response_in_the_making_is_known_to_every_path(
    server: LocalServer, client: httpx2.Client
) -> None:
    """Its items can be listed; going on with it is refused for what it is."""
    with in_the_making(server, client) as (made, _):
        items = client.get(f"{PATH}/{made}/input_items").json()["data"]
        assert [item["role"] for item in items] == ["user"]
        error = refused(client.post(PATH, json={"input": "x", "previous_response_id": made}))
        assert error["param"] == "previous_response_id"
        assert "is still being made" in error["message"]
        client.delete(f"{PATH}/{made}")


def test_what_a_query_asks_for_is_done_or_refused_by_name(client: httpx2.Client) -> None:
    """Nothing in it is passed over."""
    turns = [{"role": "user", "content": f"turn {i}"} for i in range(3)]
    made = client.post(PATH, json={"input": turns, "max_output_tokens": 2}).json()["id"]
    items = f"{PATH}/{made}/input_items"
    first = client.get(f"{items}?limit=2&order=desc").json()
    assert [item["content"] for item in first["data"]] == ["turn 2", "turn 1"]
    assert first["has_more"] is True
    then = client.get(f"{items}?order=desc&after={first['last_id']}").json()
    assert [item["content"] for item in then["data"]] == ["turn 0"]
    assert then["has_more"] is False
    for url, param in (
        (f"{items}?limit=0", "limit"),
        (f"{items}?order=up", "order"),
        (f"{PATH}/resp_none/input_items?limit=0", "limit"),  # wrong whatever it is of
        (f"{items}?after=x", "after"),
        (f"{items}?before=in_9_{made}", "before"),
        (f"{items}?include=x", "include"),
        (f"{PATH}/{made}?include[]=x", "include"),
        (f"{PATH}/{made}?starting_after=3", "starting_after"),
        (f"{PATH}/{made}?stream=true", "stream"),
    ):
        assert refused(client.get(url))["param"] == param


def listed(**query: str | None) -> tuple[str, bool]:
    found = page(ITEMS, **{"limit": None, "order": None, "after": None, "before": None, **query})
    names = [item["id"] for item in found["data"]]
    assert (found["first_id"], found["last_id"]) == (
        (names[0], names[-1]) if names else (None, None)
    )
    return "".join(names), found["has_more"]


def test_pages_follow_one_another() -> None:
    """In either order, between two items, and without any."""
    assert listed() == ("abcde", False)
    assert listed(order="desc") == ("edcba", False)
    assert listed(limit="2") == ("ab", True)
    assert listed(limit="3", after="b") == ("cde", False)
    assert listed(order="desc", after="c") == ("ba", False)
    assert listed(after="a", before="e", limit="2") == ("bc", True)
    assert listed(after="e") == ("", False)
    assert listed(after="d", before="b") == ("", False)
    assert listed(limit="100") == ("abcde", False)


@pytest.mark.parametrize("limit", ["", "0", "101", "-1", "1.0", "١", "1" * 5000, " 1"])
def test_a_limit_is_a_number_of_three_digits(limit: str) -> None:
    """Whatever else stands there is told."""
    with pytest.raises(ApiError, match="1 to 100 is possible"):
        listed(limit=limit)
