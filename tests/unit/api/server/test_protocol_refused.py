from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.api.server.protocol import Fields
from paceline.api.server.protocol_chat import ChatRequest
from paceline.api.server.protocol_completions import CHATS_NAMES, CompletionRequest
from paceline.api.server.protocol_refused import ELSEWHERE, PATHS, REFUSED, check_fields
from paceline.api.server.protocol_responses import ResponsesRequest
from paceline.api.server.protocol_sampling import ALIASES, SamplingFields
from paceline.api.server.protocol_tokens import DetokenizeRequest, TokenizeRequest
from tests.served import refusal

NEEDED: dict[type[Fields], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"prompt": "x"},
    ResponsesRequest: {"input": "x"},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [5]},
}
ANSWERING = (ChatRequest, CompletionRequest, ResponsesRequest)
NAMES = sorted({name for model in PATHS for name in model.model_fields})


def body(model: type[Fields], **fields: Any) -> Fields:
    return model.model_validate({**NEEDED[model], **fields})


def foreign(model: type[Fields]) -> Iterator[str]:
    """Every field of the other paths that this one has not."""
    return (name for name in NAMES if name not in model.model_fields)


def test_every_path_is_looked_through() -> None:
    """A request model that is not in the table would be one whose fields nobody refuses."""
    assert set(PATHS) == set(NEEDED)
    assert set(ELSEWHERE) <= set(NAMES)


@pytest.mark.parametrize("model", ANSWERING)
def test_a_field_of_another_path_is_refused_or_honoured(model) -> None:
    """An answer in which it was dropped would look as if it had been honoured."""
    for name in foreign(model):
        if model is CompletionRequest and name in CHATS_NAMES:
            assert getattr(body(model, **{name: 7}), CHATS_NAMES[name]) == 7
            continue
        for value in ("\x00 nothing neutral", 7):
            error = refusal(check_fields, body(model, **{name: value}), strict=False)
            assert (error.status, error.param) == (400, name)
        assert name in REFUSED or PATHS[model] in error.message


@pytest.mark.parametrize("model", PATHS)
def test_what_asks_for_nothing_passes(model) -> None:
    """Clients write null, and the defaults of other paths."""
    for name in foreign(model):
        neutral = REFUSED[name][0] if name in REFUSED else ([], {}, *ELSEWHERE.get(name, ()))
        read = model is CompletionRequest and name in CHATS_NAMES
        for value in (None, *(() if read else neutral)):
            check_fields(body(model, **{name: value}), strict=True)


@pytest.mark.parametrize(
    "model,fields",
    [
        (ChatRequest, {"best_of": 1}),
        (ChatRequest, {"best_of": 2, "n": 2}),
        (ResponsesRequest, {"best_of": 1, "add_generation_prompt": True, "tool_choice": "auto"}),
        (CompletionRequest, {"tool_choice": "none", "tools": []}),
        (CompletionRequest, {"max_tokens": 9, "max_completion_tokens": 9, "ignore_eos": True}),
        (TokenizeRequest, {"max_tokens": 9, "temperature": 0, "stream": True, "logprobs": 3}),
        (TokenizeRequest, {"max_completion_tokens": 9, "tool_choice": "auto", "tools": [{}]}),
        (DetokenizeRequest, {"temperature": 0, "skip_special_tokens": False}),
    ],
)
def test_what_clients_send_without_need_passes(model, fields) -> None:
    """Load generators and gateways send one body to every path."""
    check_fields(body(model, **fields), strict=True)


@pytest.mark.parametrize(
    "model,fields",
    [
        (ChatRequest, {"best_of": 2}),
        (ChatRequest, {"best_of": True}),
        (CompletionRequest, {"add_generation_prompt": True}),
        (CompletionRequest, {"top_logprobs": False}),
        (CompletionRequest, {"include_reasoning": 1}),
        (ResponsesRequest, {"add_generation_prompt": False}),
        (ResponsesRequest, {"logprobs": 0}),
        (TokenizeRequest, {"tool_choice": "none", "tools": [{}]}),
        (TokenizeRequest, {"truncate_prompt_tokens": 4}),
        (TokenizeRequest, {"reasoning_effort": "low"}),
        (DetokenizeRequest, {"skip_special_tokens": True}),
        (DetokenizeRequest, {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_what_would_change_an_answer_is_refused(model, fields) -> None:
    """Neutral is what the path does anyway; `true` is no 1, and `false` no 0."""
    error = refusal(check_fields, body(model, **fields), strict=False)
    assert (error.status, error.param) == (400, next(iter(fields)))


def test_one_limit_said_twice_is_refused() -> None:
    """Of chat's name of a limit and completions' own neither may win in silence."""
    with pytest.raises(ValueError, match="two values"):
        body(CompletionRequest, max_tokens=8, max_completion_tokens=9)


def test_no_name_is_both_read_and_refused() -> None:
    """Of two rules for one name one would never be reached."""
    assert not set(REFUSED) & (set(ALIASES) | set(SamplingFields.model_fields))
