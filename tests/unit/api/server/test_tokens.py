from __future__ import annotations

from dataclasses import replace

import pytest
from openai.types import Model

from paceline.api.server.protocol_tokens import DetokenizeRequest, TokenizeRequest
from paceline.api.server.tokens import detokenize, model_card, model_list, rendered, tokenize
from tests.local_server import local_server
from tests.served import chat_call, context, ids, refusal

CONTEXT = context()


def asked(**fields: object) -> TokenizeRequest:
    return TokenizeRequest.model_validate(fields)


def test_a_text_becomes_tokens() -> None:
    """vLLM's answer."""
    answer = tokenize(asked(prompt="the end", return_token_strs=True), CONTEXT)
    assert answer["tokens"] == ids("the end")
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 200)
    assert "".join(answer["token_strs"]) == "the end"


def test_llama_cpps_name_is_read() -> None:
    """Its clients send content."""
    assert tokenize(asked(content="a"), CONTEXT)["tokens"] == ids("a")


def test_a_conversation_becomes_what_the_model_sees() -> None:
    """The same tokens that a chat would be answered from."""
    messages = [{"role": "user", "content": "hi"}]
    prompt = chat_call(CONTEXT, messages=messages).job.prompts[0]
    assert tokenize(asked(messages=messages), CONTEXT)["tokens"] == list(prompt)


def test_a_conversation_is_shown_as_the_model_sees_it() -> None:
    """Its template's text, the ids of that, and how many tokens an answer may have."""
    call = chat_call(CONTEXT, messages=[{"role": "user", "content": "hi"}])
    shown = rendered(call)
    assert shown["prompt"].count("hi") == 1
    assert shown["prompt_token_ids"] == ids(shown["prompt"]) == list(call.job.prompts[0])
    assert shown["max_tokens"] == 200 - shown["count"] == 200 - len(shown["prompt_token_ids"])
    cut = rendered(replace(call, job=replace(call.job, prompts=[[5, 6]])))
    assert (cut["prompt"], cut["prompt_token_ids"], cut["count"]) == (shown["prompt"], [5, 6], 2)


def test_rendering_asks_nothing_of_the_engine() -> None:
    """What a chat would be refused for is refused, and nothing is generated."""
    fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    path = "/v1/chat/completions"
    with local_server() as server, server.client() as client:
        shown = client.post(f"{path}/render", json=fields)
        assert shown.status_code == 200
        wrong = [client.post(p, json={**fields, "top_p": 2}) for p in (path, f"{path}/render")]
        assert [answer.status_code for answer in wrong] == [400, 400]
        assert wrong[0].json() == wrong[1].json()
        assert server.engine.added == []
        assert client.post(path, json=fields).status_code == 200
        (asked,) = server.engine.added
    assert shown.json()["prompt_token_ids"] == list(asked.prompt_ids)
    assert shown.json()["max_tokens"] == asked.params.max_tokens == 3


def test_tools_are_counted_as_they_are_served() -> None:
    """A template that cannot write tools is given them as text: the count must not leave that out."""
    from paceline.api.server import chat
    from paceline.api.server.protocol_chat import ChatRequest
    from paceline.api.server.tools import planner_of

    planner = planner_of(CONTEXT.tokenizer)
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    fields = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    counted = tokenize(asked(**fields), replace(CONTEXT, max_len=9), planner=planner)
    wide = replace(CONTEXT, max_len=9000)
    call = chat.read(ChatRequest.model_validate(fields), wide, planner=planner)
    assert counted["tokens"] == list(call.job.prompts[0])
    assert counted["count"] > 200


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": "a", "messages": []},
        {"messages": []},
        {"prompt": "\ud800"},
        {"messages": [{}]},
    ],
)
def test_what_has_no_tokens_is_refused(fields) -> None:
    """One of the two is needed, and it must be valid."""
    assert refusal(tokenize, asked(**fields), CONTEXT).status == 400


def test_tokens_become_text() -> None:
    """Special ones are shown: it is what was encoded; both names of the answer are there."""
    body = DetokenizeRequest(tokens=[*ids("é"), 2])
    assert detokenize(body, CONTEXT) == {"prompt": "é<|im_end|>", "content": "é<|im_end|>"}
    assert refusal(detokenize, DetokenizeRequest(tokens=[97]), CONTEXT).param == "tokens"
    assert detokenize(DetokenizeRequest(tokens=[]), CONTEXT)["prompt"] == ""


def test_cards_are_openais() -> None:
    """The official client's type accepts them; the context's length is there for gateways."""
    [card] = model_list(CONTEXT)["data"]
    assert Model.model_validate(card, strict=True).id == "tiny"
    assert card == model_card("tiny", CONTEXT)
    assert card["max_model_len"] == 200
    error = refusal(model_card, "other", CONTEXT)
    assert (error.status, error.code) == (404, "model_not_found")
