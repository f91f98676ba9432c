from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from paceline.api.server.errors import ApiError
from paceline.api.server.protocol_answers import ChatAnswer
from paceline.core.request import Fault
from tests.fake_engine import EOS
from tests.served import (
    answered,
    chat_call,
    context,
    flat,
    ids,
    refusal,
    results,
    run,
    served,
    streamed,
)

SCRIPT = [*ids("the end of it"), EOS]
E_ACUTE = ids("é")  # two tokens, a byte each


def text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def test_a_whole_answer_is_openais() -> None:
    """The official client's own types accept it, all required fields included."""
    with served(SCRIPT) as (llm, found):
        answer = answered(llm, chat_call(found, logprobs=True, top_logprobs=3))
    read = ChatCompletion.model_validate(answer, strict=True)
    assert read.id.startswith("chatcmpl-")
    assert read.choices[0].message.content == "the end of it"
    assert read.choices[0].finish_reason == "stop"
    assert read.usage.completion_tokens == len(SCRIPT)
    assert read.usage.prompt_tokens_details.cached_tokens == 0
    assert [len(entry.top_logprobs) for entry in read.choices[0].logprobs.content] == [3] * len(
        SCRIPT
    )


def test_chunks_are_openais() -> None:
    """First the role, then text, then the reason, then, where asked for, the usage."""
    with served(SCRIPT) as (llm, found):
        call = chat_call(found, stream=True, stream_options={"include_usage": True})
        chunks = streamed(llm, call)
    read = [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks]
    assert len({chunk.id for chunk in read}) == 1
    assert read[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in read[1:-1])
    assert text(chunks) == "the end of it"
    reasons = [chunk.choices[0].finish_reason for chunk in read[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert read[-1].choices == []
    assert read[-1].usage.completion_tokens == len(SCRIPT)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_a_stream_says_what_the_whole_says() -> None:
    """Whoever switches streaming on must not get another answer."""
    body = {"n": 2, "logprobs": True, "return_token_ids": True, "paceline": {"sources": True}}
    with served(SCRIPT) as (llm, found):
        whole = answered(llm, chat_call(found, **body))
        chunks = streamed(
            llm, chat_call(found, **body, stream=True, stream_options={"include_usage": True})
        )
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert text(chunks, choice["index"]) == choice["message"]["content"]
        assert flat(c.get("token_ids", []) for c in own) == choice["token_ids"]
        told = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert told == choice["logprobs"]["content"]
        for key in ("sources", "tokens", "token_ids"):
            joined = flat(c["paceline"][key] for c in own if "paceline" in c)
            assert joined == choice["paceline"][key]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]


def test_running_usage_grows() -> None:
    """Clients that count as they read need every chunk to say where it stands."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    with served(SCRIPT) as (llm, found):
        chunks = streamed(llm, chat_call(found, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == len(SCRIPT)


def test_text_is_told_when_it_is_certain() -> None:
    """Half a character and half a stop string are held back, and no empty chunk is sent for them."""
    script = [*ids("a"), *E_ACUTE, *ids("b"), EOS]
    with served(script, width=1) as (llm, found):
        chunks = streamed(llm, chat_call(found))
    deltas = [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-1]]
    assert deltas == ["a", "é", "b"]


def test_a_stop_string_ends_an_answer_and_is_named() -> None:
    """vLLM's stop_reason tells which one it was."""
    with served(SCRIPT) as (llm, found):
        answer = answered(llm, chat_call(found, stop=["zzz", " of"]))["choices"][0]
        kept = answered(llm, chat_call(found, stop=" of", include_stop_str_in_output=True))
    assert answer["message"]["content"] == "the end"
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", " of")
    assert kept["choices"][0]["message"]["content"] == "the end of"


def test_a_hundred_stop_strings_are_served() -> None:
    """OpenAI allows four; benchmarks and agents send more."""
    with served(SCRIPT) as (llm, found):
        stops = [f"never{i}" for i in range(99)] + ["it"]
        answer = answered(llm, chat_call(found, stop=stops))
    assert answer["choices"][0]["stop_reason"] == "it"


def test_one_token_is_possible() -> None:
    """The least that can be asked for; gateways use it to probe."""
    with served(SCRIPT) as (llm, found):
        answer = answered(llm, chat_call(found, max_tokens=1))
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


def test_samples_are_in_order() -> None:
    """A client reads choices by place."""
    with served(lambda request, _: [5 + request.sample_index, EOS]) as (llm, found):
        answer = answered(llm, chat_call(found, n=4))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["c", "d", "e", "f"]
    assert answer["usage"]["completion_tokens"] == 8
    assert "metrics" not in answer


def test_figures_stand_at_the_root() -> None:
    """AIPerf looks there for the histogram, llama.cpp's client for the timings."""
    with served(SCRIPT) as (llm, found):
        whole = answered(llm, chat_call(found))
        plain = streamed(llm, chat_call(found))
        asked = streamed(llm, chat_call(found, stream=True, stream_options={"include_usage": True}))
    for holder in (whole, plain[-1], asked[-1]):
        figures = holder["metrics"]["speculative_decoding"]
        assert len(figures["acceptance_histogram"]) == figures["num_spec_tokens"] + 1
        assert holder["timings"]["predicted_n"] == len(SCRIPT)
    assert sum("metrics" in chunk for chunk in asked) == 1


def test_the_token_sources_are_named() -> None:
    """The page tints what was drafted."""
    with served(SCRIPT) as (llm, found):
        told = answered(llm, chat_call(found, paceline={"sources": True}))["choices"][0]["paceline"]
    assert set(told["sources"]) == {"target", "own text"}
    assert len(told["sources"]) == len(told["tokens"]) == len(told["token_ids"]) == len(SCRIPT)


def test_the_answer_repeats_what_was_asked_for() -> None:
    """Clients match answers to requests by id and model."""
    with served(SCRIPT) as (llm, found):
        answer = answered(llm, chat_call(found, request_id="mine", model="tiny"))
    assert (answer["id"], answer["model"]) == ("chatcmpl-mine", "tiny")
    assert answer["system_fingerprint"].startswith("paceline-1.2-fake-")


@pytest.mark.parametrize(
    "fields,param",
    [
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "messages",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields, param) -> None:
    """Before the engine hears of it."""
    error = refusal(chat_call, context(), **fields)
    assert error.param == param
    assert error.status == (404 if param == "model" else 400)


def test_parts_of_text_are_joined() -> None:
    """OpenAI's clients send a list of parts for one text."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = context()
    joined = chat_call(found, messages=[{"role": "user", "content": parts}]).prompt
    assert joined == chat_call(found, messages=[{"role": "user", "content": "a\nb"}]).prompt


def test_log_probabilities_of_a_prompt_stand_at_the_root() -> None:
    """As vLLM's: of the conversation as the model sees it, once for all samples; not in streams."""
    with served(SCRIPT) as (llm, found):
        call = chat_call(found, prompt_logprobs=0, n=2)
        answer = answered(llm, call)
        assert "prompt_logprobs" not in answered(llm, chat_call(found))
    ChatAnswer.model_validate(answer, strict=True)
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert [list(told) for told in others] == [[str(i)] for i in call.job.prompts[0][1:]]
    assert all(one["rank"] == 3 for told in others for one in told.values())
    error = refusal(chat_call, found, prompt_logprobs=1, stream=True)
    assert (error.status, error.param) == (400, "prompt_logprobs")


def test_an_answer_that_failed_is_no_answer() -> None:
    """Half an answer with a status of 200 would be taken for a whole one."""
    from dataclasses import replace

    with served(SCRIPT) as (llm, found):
        call = chat_call(found)
        chunks = run(llm, call.job)
    [result] = results(chunks)
    for reason, fault, status in (
        ("error", Fault.ENGINE, 500),
        ("error", Fault.REQUEST, 400),
        ("abort", None, 503),
    ):
        torn = replace(result, finish_reason=reason, error="no numbers", fault=fault)
        with pytest.raises(ApiError) as caught:
            call.response([torn])
        assert caught.value.status == status
        with pytest.raises(ApiError):
            call.stream().take(replace(chunks[-1], result=torn))
