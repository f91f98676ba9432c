from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from paceline.api.server.sampling import scope_of
from paceline.core.request import SamplingParams
from tests.served import chat_call, completion_call, context, ids, refusal, served

CONTEXT = context()

# Field of a request -> its value, and what the engine is told.
OPTIONS: dict[str, tuple[Any, str, Any]] = {
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.5, "top_p", 0.5),
    "top_k": (7, "top_k", 7),
    "min_p": (0.1, "min_p", 0.1),
    "presence_penalty": (-2, "presence_penalty", -2),
    "frequency_penalty": (1.5, "frequency_penalty", 1.5),
    "repetition_penalty": (1.25, "repetition_penalty", 1.25),
    "logit_bias": ({"5": -100, "6": 1.5}, "logit_bias", {5: -100, 6: 1.5}),
    "seed": (-3, "seed", -3),
    "n": (3, "n", 3),
    "stop": ("x", "stop", ["x"]),
    "stop_token_ids": ([7], "stop_token_ids", (7,)),
    "include_stop_str_in_output": (True, "include_stop_str_in_output", True),
    "ignore_eos": (True, "ignore_eos", True),
    "min_tokens": (2, "min_tokens", 2),
    "max_tokens": (9, "max_tokens", 9),
    "allowed_token_ids": ([5, 6], "allowed_token_ids", (5, 6)),
    "bad_words": (["a"], "banned_token_ids", tuple(ids("a"))),
    "skip_special_tokens": (False, "skip_special_tokens", False),
    "speculative": ({"num_speculative_tokens": 2}, "num_speculative_tokens", 2),
}


@pytest.mark.parametrize("make", [chat_call, completion_call])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_reaches_the_engine(make, name) -> None:
    """An option that is read and then lost is the most common bug of servers with speculation."""
    value, param, expected = OPTIONS[name]
    assert getattr(make(CONTEXT, **{name: value}).job.params, param) == expected


def test_every_option_of_the_engine_can_be_asked_for() -> None:
    """A new sampling option must get its field."""
    reached = {param for _, param, _ in OPTIONS.values()} | {"logprobs", "drafter"}  # tested below
    assert reached == {field.name for field in fields(SamplingParams)}


def test_nothing_said_means_the_defaults() -> None:
    """OpenAI's: temperature 1, one answer; completions have 16 tokens, chats what is left."""
    chat, text = chat_call(CONTEXT).job, completion_call(CONTEXT).job
    assert chat.params == SamplingParams(max_tokens=200 - len(chat.prompts[0]))
    assert text.params == SamplingParams(max_tokens=16)


@pytest.mark.parametrize(
    "name,value,param",
    [
        ("spaces_between_special_tokens", True, None),
        ("stop_token_ids", [97], None),
        ("allowed_token_ids", [5, 1000], None),
        ("allowed_token_ids", [], None),
        ("logit_bias", {"97": 1}, None),
        ("logit_bias", {"-1": 1}, None),
        ("logit_bias", {"1.0": 1}, None),
        ("logit_bias", {"٣": 1}, None),
        ("logit_bias", {"7": 1, "007": 2}, None),
        ("logit_bias", {"5": 101}, None),
        ("bad_words", ["the cat"], None),
        ("bad_words", [""], None),
        ("bad_words", ["\ud800"], None),
        ("min_tokens", 17, None),
        ("stop", [""], None),
        ("stop", ["x" * 1025], None),
        ("stop", ["\ud800"], None),
        ("truncate_prompt_tokens", 0, None),
        ("speculative", {"method": "eagle3"}, "speculative.method"),
        (
            "speculative",
            {"enabled": False, "num_speculative_tokens": 2},
            "speculative.num_speculative_tokens",
        ),
        ("speculative", {"enabled": True, "method": "none"}, "speculative.method"),
        ("suffix", "x", None),
        ("stream_options", {"include_usage": True}, None),
        ("best_of", 2, None),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name, value, param) -> None:
    """A 400 that names the field, before the engine hears of it."""
    error = refusal(completion_call, CONTEXT, **{name: value})
    assert (error.status, error.param) == (400, param or name)


def test_a_refused_method_is_told_what_is_loaded() -> None:
    """The client cannot know the server's command line."""
    error = refusal(completion_call, CONTEXT, speculative={"method": "eagle3"})
    assert "'fake' and 'none'" in error.message


@pytest.mark.parametrize(
    "asked,most",
    [
        ({}, None),
        ({"enabled": True}, None),
        ({"enabled": False}, 0),
        ({"method": "none"}, 0),
        ({"method": "fake"}, None),
        ({"method": "fake", "num_speculative_tokens": 3}, 3),
        ({"num_speculative_tokens": 0}, 0),
    ],
)
def test_a_request_chooses_its_speculation(asked, most) -> None:
    """Three ways to say that nothing is to be drafted, and one to say how much."""
    params = completion_call(CONTEXT, speculative=asked).job.params
    assert params.num_speculative_tokens == most


def test_a_request_names_one_of_several_drafters() -> None:
    """The engine hears of a part; the drafter's own name says nothing that it does not do anyway."""
    from dataclasses import replace

    several = replace(CONTEXT, drafter="merged", parts=("suffix", "ddtree"))
    for name, part in (("ddtree", "ddtree"), ("merged", None), ("none", None)):
        params = completion_call(several, speculative={"method": name}).job.params
        assert params.drafter == part
        assert params.num_speculative_tokens == (0 if name == "none" else None)


def test_without_a_drafter_speculation_cannot_be_asked_for() -> None:
    """A promise of drafts that nobody makes would make measurements wrong."""
    from dataclasses import replace

    bare = replace(CONTEXT, drafter="none")
    assert completion_call(bare, speculative={"enabled": False}).job.params
    assert refusal(completion_call, bare, speculative={"enabled": True}).status == 400
    assert refusal(completion_call, bare, speculative={"num_speculative_tokens": 2}).status == 400


@pytest.mark.parametrize("make,param", [(chat_call, "messages"), (completion_call, "prompt")])
def test_what_is_too_long_has_openais_code(make, param) -> None:
    """Clients shorten the conversation and try again when they see the code."""
    with served(max_len=30) as (_, small):
        long = {
            "messages": {"messages": [{"role": "user", "content": "a" * 60}]},
            "prompt": {"prompt": "a" * 30},
        }[param]
        error = refusal(make, small, **long)
        assert (error.status, error.code, error.param) == (400, "context_length_exceeded", param)
        assert "maximum context length is 30 tokens" in error.message
        room = 30 - len(make(small).job.prompts[0])
        assert make(small, max_tokens=room).job.params.max_tokens == room
        error = refusal(make, small, max_tokens=room + 1)
        assert (error.status, error.code) == (400, "context_length_exceeded")
        assert error.param == "max_tokens"
    error = refusal(chat_call, CONTEXT, max_completion_tokens=5000)
    assert error.param == "max_completion_tokens"


def test_a_default_is_no_demand() -> None:
    """A completion that says no length gets what is left, not an error."""
    with served(max_len=30) as (_, small):
        assert completion_call(small, prompt="a" * 25).job.params.max_tokens == 5


def test_a_prompt_is_cut_at_its_beginning() -> None:
    """The newest of a text is what its continuation depends on."""
    prompt = completion_call(CONTEXT, prompt="abcdef", truncate_prompt_tokens=2).job.prompts[0]
    assert prompt == ids("ef")
    with served(max_len=30) as (_, small):
        call = completion_call(small, prompt="a" * 99, truncate_prompt_tokens=-1, max_tokens=4)
        assert len(call.job.prompts[0]) == 26
        whole = {"messages": [{"role": "user", "content": "a" * 99}], "truncate_prompt_tokens": -1}
        assert len(chat_call(small, max_completion_tokens=4, **whole).job.prompts[0]) == 26


def test_scopes_cannot_be_spelled_by_others() -> None:
    """What one tenant writes as a salt must never be another tenant's scope."""
    body = completion_call(CONTEXT).body
    assert scope_of(body, "") == ""
    salted = completion_call(CONTEXT, cache_salt='a", "b').body
    scopes = {scope_of(b, tenant) for b in (body, salted) for tenant in ("", "a", 'a", "b')}
    assert len(scopes) == 6
    assert completion_call(CONTEXT, cache_salt="s").job.scope == scope_of(
        completion_call(CONTEXT, cache_salt="s").body, ""
    )


def test_a_request_may_share_with_nobody() -> None:
    """llama.cpp's cache_prompt: false is honoured by a scope of its own."""
    one, two = (completion_call(CONTEXT, cache_prompt=False).job.scope for _ in range(2))
    assert one != two != ""
    assert completion_call(CONTEXT, cache_prompt=True).job.scope == ""


def test_banned_words_are_banned_after_a_space_too() -> None:
    """A word seldom begins a text."""
    banned = completion_call(CONTEXT, bad_words=["the"]).job.params.banned_token_ids
    assert set(banned) == {*ids("the"), *ids(" the")}
    assert len(banned) == 2
