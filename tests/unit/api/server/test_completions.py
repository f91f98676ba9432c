from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion

from paceline.api.server.protocol_answers import CompletionAnswer
from tests.fake_engine import EOS
from tests.served import (
    TOKENIZER,
    answered,
    completion_call,
    context,
    flat,
    ids,
    refusal,
    served,
    streamed,
)

SCRIPT = [*ids("the end"), EOS]


def text(chunks: list[dict[str, Any]], index: int) -> str:
    return "".join(
        choice["text"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def test_a_whole_answer_is_openais() -> None:
    """The official client's own types accept it, all required fields included."""
    with served(SCRIPT) as (llm, found):
        answer = answered(llm, completion_call(found, logprobs=2))
    read = Completion.model_validate(answer, strict=True)
    assert read.id.startswith("cmpl-")
    assert read.choices[0].text == "the end"
    assert read.choices[0].finish_reason == "stop"
    assert read.usage.total_tokens == 1 + len(SCRIPT)
    told = read.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == len(SCRIPT)


def test_chunks_are_openais() -> None:
    """The client has one type for whole answers and chunks, in which the reason is required."""
    with served(SCRIPT) as (llm, found):
        chunks = streamed(
            llm, completion_call(found, stream=True, stream_options={"include_usage": True})
        )
    for chunk in chunks:
        unfinished = [c for c in chunk["choices"] if c["finish_reason"] is None]
        told = {**chunk, "choices": [c for c in chunk["choices"] if c not in unfinished]}
        Completion.model_validate(told, strict=True)
    assert text(chunks, 0) == "the end"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(SCRIPT)


@pytest.mark.parametrize(
    "prompt,expected",
    [
        ("the", [ids("the")]),
        (["the", "a"], [ids("the"), ids("a")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ([[5, 6], "a"], [[5, 6], ids("a")]),
    ],
)
def test_a_prompt_has_four_shapes(prompt, expected) -> None:
    """OpenAI's four; a list of numbers is one prompt."""
    assert completion_call(context(), prompt=prompt).job.prompts == expected


@pytest.mark.parametrize(
    "prompt,param",
    [
        ([], "prompt"),
        ("", "prompt"),
        (["a", ""], "prompt.1"),
        ([[]], "prompt"),
        ([[5], []], "prompt.1"),
        (None, "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        ([5, "a"], "prompt"),
        (["a", 5], "prompt.1"),
        ([True], "prompt"),
        ([5, True], "prompt"),
        ([5, 97], "prompt"),
        ([[5], [-1]], "prompt.1"),
        ([[[5]]], "prompt"),
        ("\ud800", "prompt"),
        (["a"] * 5000, "prompt"),
    ],
)
def test_other_shapes_are_refused(prompt, param) -> None:
    """With the place, as lists of prompts are long."""
    error = refusal(completion_call, context(), prompt=prompt)
    assert (error.status, error.param) == (400, param)


def test_answers_are_ordered_by_prompt_then_sample() -> None:
    """A client reads choices by place."""
    with served(lambda request, _: [request.prompt_ids[0] + request.sample_index, EOS]) as (
        llm,
        found,
    ):
        call = completion_call(found, prompt=[[10], [20], [30, 31]], n=2)
        answer, chunks = answered(llm, call), streamed(llm, call)
    expected = [TOKENIZER.decode([i]) for i in (10, 11, 20, 21, 30, 31)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [text(chunks, i) for i in range(6)] == expected
    assert answer["usage"]["prompt_tokens"] == 4  # a prompt counts once
    assert answer["usage"]["completion_tokens"] == 12


def test_a_stream_says_what_the_whole_says() -> None:
    """Whoever switches streaming on must not get another answer."""
    body = {
        "prompt": ["a", "the"],
        "n": 2,
        "logprobs": 1,
        "return_token_ids": True,
        "paceline": {"sources": True},
    }
    with served([*ids("é the"), EOS], width=2) as (llm, found):
        whole = answered(llm, completion_call(found, **body))
        chunks = streamed(llm, completion_call(found, **body))
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert text(chunks, choice["index"]) == choice["text"]
        assert flat(c["token_ids"] for c in own) == choice["token_ids"]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        for key, values in choice["logprobs"].items():
            assert flat(c["logprobs"][key] for c in own if c["logprobs"]) == values


def test_echo_puts_the_prompt_first() -> None:
    """Once per answer, and offsets count from its beginning."""
    with served(SCRIPT) as (llm, found):
        call = completion_call(found, prompt=["a b", [5]], echo=True)
        answer, chunks = answered(llm, call), streamed(llm, call)
    assert [choice["text"] for choice in answer["choices"]] == ["a bthe end", "cthe end"]
    assert [text(chunks, i) for i in range(2)] == ["a bthe end", "cthe end"]


@pytest.mark.parametrize("logprobs", [0, 2])
def test_an_echo_has_the_prompts_logprobs(logprobs: int) -> None:
    """What lm-evaluation-harness reads: four lists over prompt and answer; the first token has none."""
    with served(SCRIPT) as (llm, found):
        call = completion_call(found, prompt=["é the", [5]], echo=True, logprobs=logprobs, n=2)
        assert call.job.prompt_logprobs == logprobs
        answer, chunks = answered(llm, call), streamed(llm, call)
        plain = answered(llm, completion_call(found, prompt=["é the", [5]], logprobs=logprobs, n=2))
    CompletionAnswer.model_validate(answer, strict=True)
    for choice, other in zip(answer["choices"], plain["choices"], strict=True):
        told, of_answer = choice["logprobs"], other["logprobs"]
        prompt = call.job.prompts[choice["index"] // 2]
        count = len(prompt)
        assert told["tokens"][count:] == of_answer["tokens"]
        assert told["token_logprobs"][count:] == of_answer["token_logprobs"]
        assert told["top_logprobs"][count:] == of_answer["top_logprobs"]
        assert told["tokens"][:count] == [TOKENIZER.token_text(token) for token in prompt]
        assert told["token_logprobs"][:count] == [None, *[-0.5] * (count - 1)]
        assert told["top_logprobs"][0] is None
        assert all(len(top) == max(1, logprobs) for top in told["top_logprobs"][1:count])
        start = len(choice["text"]) - len(other["text"])
        assert [at - start for at in told["text_offset"][count:]] == of_answer["text_offset"]
        whole = [(at, name) for at, name in zip(told["text_offset"], told["tokens"], strict=True)]
        shown = [pair for pair in whole if TOKENIZER.encode(pair[1]) != [EOS]]
        assert all(choice["text"][at:].startswith(n) for at, n in shown if "\ufffd" not in n)
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        for key, values in told.items():
            assert flat(c["logprobs"][key] for c in own if c["logprobs"]) == values


@pytest.mark.parametrize("logprobs", [None, 1])
def test_nothing_but_the_echo(logprobs: int | None) -> None:
    """`max_tokens` 0 reads a text and adds nothing to it: not to its tokens, and not to the bill."""
    body = {"prompt": ["a b", [5]], "echo": True, "max_tokens": 0, "logprobs": logprobs}
    body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    with served(SCRIPT) as (llm, found):
        answer = answered(llm, completion_call(found, **{**body, "stream_options": None}))
        call = completion_call(found, stream=True, **body)
        chunks = streamed(llm, call)
    CompletionAnswer.model_validate(answer, strict=True)
    assert call.job.params.max_tokens == 1
    assert answer["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == 0
    for choice, echo in zip(answer["choices"], ["a b", "c"], strict=True):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert text(chunks, choice["index"]) == choice["text"] == echo
        assert choice["finish_reason"] == own[-1]["finish_reason"] == "length"
        assert choice["token_ids"] == flat(c["token_ids"] for c in own) == []
        told = choice["logprobs"]
        assert (told is None) == (logprobs is None)
        if told is not None:
            assert len(told["tokens"]) == len(choice["prompt_token_ids"])
            streams = [c["logprobs"] for c in own if c["logprobs"]]
            assert flat(s["token_logprobs"] for s in streams) == told["token_logprobs"]
    error = refusal(completion_call, found, max_tokens=0)
    assert (error.status, error.param) == (400, "max_tokens")
    error = refusal(completion_call, found, max_tokens=0, echo=True, min_tokens=1)
    assert (error.status, error.param) == (400, "min_tokens")


def test_log_probabilities_of_a_prompt_are_told_as_vllm_tells_them() -> None:
    """None for the first token, then by id the prompt's token and the likeliest, each with its rank."""
    with served(SCRIPT) as (llm, found):
        body = {"prompt": ["é the", [5]], "prompt_logprobs": 2, "n": 2}
        call = completion_call(found, **body)
        answer = answered(llm, call)
        echo = answered(llm, completion_call(found, **body, echo=True, logprobs=1))
        named = answered(
            llm, completion_call(found, **body, return_tokens_as_token_ids=True, logprobs=0)
        )
    assert call.job.prompt_logprobs == 2
    for whole in (answer, echo, named):
        CompletionAnswer.model_validate(whole, strict=True)
    for i, choice in enumerate(answer["choices"]):
        assert choice["logprobs"] is None
        first, *others = choice["prompt_logprobs"]
        assert first is None
        prompt = call.job.prompts[i // 2]
        assert len(others) == len(prompt) - 1
        for token, told in zip(prompt[1:], others, strict=True):
            second = (token + 1) % 97  # as the engine makes them up
            assert told == {
                str(token): {
                    "logprob": -0.5,
                    "rank": 3,
                    "decoded_token": TOKENIZER.token_text(token),
                },
                str(second): {
                    "logprob": -0.75,
                    "rank": 2,
                    "decoded_token": TOKENIZER.token_text(second),
                },
            }
        echoed, shown = echo["choices"][i], named["choices"][i]
        assert echoed["prompt_logprobs"] == choice["prompt_logprobs"]
        assert all(top is None or len(top) == 1 for top in echoed["logprobs"]["top_logprobs"])
        assert len(shown["logprobs"]["tokens"]) == len(SCRIPT), "no echo, no prompt"
        for told in shown["prompt_logprobs"][1:]:
            assert all(one["decoded_token"] == f"token_id:{key}" for key, one in told.items())
    error = refusal(completion_call, found, prompt_logprobs=0, stream=True)
    assert (error.status, error.param) == (400, "prompt_logprobs")
    assert completion_call(found, prompt_logprobs=0).job.prompt_logprobs == 0


def test_who_wants_no_echo_has_no_prompt_scored() -> None:
    """It would cost the prefix cache."""
    assert completion_call(context(), logprobs=3).job.prompt_logprobs is None
    assert completion_call(context(), echo=True).job.prompt_logprobs is None


def test_echo_shows_what_was_sent() -> None:
    """Even where the tokenizer cannot spell it."""
    with served(SCRIPT) as (llm, found):
        answer = answered(llm, completion_call(found, prompt="a ☃", echo=True))
    assert answer["choices"][0]["text"] == "a ☃the end"


def test_neutral_values_of_what_is_refused_pass() -> None:
    """Clients send their defaults."""
    call = completion_call(context(), suffix="", best_of=1, echo=False)
    assert call.job.params.n == 1
    assert completion_call(context(), best_of=3, n=3).job.params.n == 3


def test_running_usage_counts_every_prompt() -> None:
    """The last chunk's usage is the whole answer's."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    with served(SCRIPT) as (llm, found):
        chunks = streamed(
            llm, completion_call(found, prompt=["a", "b"], stream=True, stream_options=options)
        )
    usages = [chunk["usage"] for chunk in chunks]
    assert all(usage["prompt_tokens"] == 2 for usage in usages)
    assert usages[-1]["completion_tokens"] == usages[-2]["completion_tokens"] == 2 * len(SCRIPT)
