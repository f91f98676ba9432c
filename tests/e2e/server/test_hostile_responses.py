"""Bodies for /v1/responses, and for tools, that nobody should send: each gets its own status."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from paceline.api.server.tool_request import MAX_TOOLS
from tests.broken_bodies import bodies

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
DEEP: dict[str, Any] = {"type": "object"}
for _ in range(6):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"]}


def respond(**fields: Any) -> str:
    return json.dumps({"input": "hi", "max_output_tokens": 2, **fields})


def tool(parameters: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": parameters}


@pytest.fixture(autouse=True)
def still_well(http: httpx2.Client):
    yield
    assert http.post(PATH, content=respond()).status_code == 200
    load = http.get("/load").json()
    assert load["num_requests_running"] == load["num_requests_waiting"] == 0


@pytest.mark.parametrize(
    "body,status",
    [
        *((body, 400) for body in bodies(respond())),
        ("{}", 400),
        (respond(input=None), 400),
        (respond(input=3), 400),
        (respond(input=[3]), 400),
        (respond(input=[{}] * 100_000), 400),
        (respond(input="\ud83d"), 400),
        (respond(input=""), 200),
        (respond(input="🙂 שלום \u202e"), 200),
        (respond()[:-1] + ', "x": ' + "[" * 2000 + "]" * 2000 + "}", 400),
        (respond(input=[{"role": "user", "content": "x", "deep": DEEP}]), 200),
        (respond(tools=[tool(DEEP)]), 200),
        (respond(tools=[tool(DEEP)], tool_choice="required"), 200),
        (
            respond(tools=[tool({"type": "object", "$ref": "#/nowhere"})], tool_choice="required"),
            400,
        ),
        (respond(tools=[tool({"type": "object", "required": 3})], tool_choice="required"), 400),
        (respond(tools=[tool({"type": "object", "properties": [1]})], tool_choice="required"), 400),
        (respond(tools=[tool({"type": "object", "x-guidance": 3})], tool_choice="required"), 200),
        (respond(tools=[tool({}, f"f{i}") for i in range(MAX_TOOLS + 1)]), 400),
        (respond(tools=[[]]), 400),
        (respond(tools={}), 400),
        (respond(previous_response_id="x" * 10_000), 400),
        (respond(previous_response_id="../../etc/passwd"), 404),
        (respond(metadata={"a": {}}), 400),
        (respond(unknown={"a": 1}), 200),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) else str(value),
)
def test_bodies_get_their_status(http: httpx2.Client, body: str, status: int) -> None:
    """An error is OpenAI's object; none of it is the server's fault."""
    answer = http.post(PATH, content=body)
    assert answer.status_code == status, answer.text
    if status != 200:
        error = answer.json()["error"]
        assert error["message"]
        assert len(error["message"]) < 5000


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("name", ["resp_x", "%00", "a%2Fb", "%F0%9F%99%82", "x" * 4000])
def test_ids_that_nobody_has_are_not_found(http: httpx2.Client, method: str, name: str) -> None:
    """Whatever they are made of."""
    assert http.request(method, f"{PATH}/{name}").status_code == 404
    assert http.post(f"{PATH}/{name}/cancel").status_code == 404


def test_a_name_of_a_function_spells_no_mark_and_no_grammar(http: httpx2.Client) -> None:
    """Names and schemas stand in a grammar: nothing in them may become a part of it."""
    for name in ('f"', "f\n", "f}", "<|im_end|>", "{name}", "f /x/"):
        body = {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}
        body |= {"tools": [tool({}, name)], "max_tokens": 2}  # type: ignore[dict-item]
        assert http.post(CHAT, json=body).status_code == 400
    odd = {'"}\nstart: "x"\n//': {"const": '"}\nstart: "x"'}, "%json": {"const": "%lark {"}}
    schema = {"type": "object", "properties": odd, "required": list(odd)}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [tool({**schema, "additionalProperties": False})],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "seed": 1,
    }
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    found = json.loads(call["function"]["arguments"])
    assert found == {name: odd[name]["const"] for name in odd}
