"""The official client against a real process on a real socket: what it is promised, it gets."""

from __future__ import annotations

import asyncio

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

ASK = [{"role": "user", "content": "the end of the and the"}]
IDS = {"return_token_ids": True, "ignore_eos": True}


def chat(client: OpenAI, **options):
    given = {"model": "tiny", "messages": ASK, "max_tokens": 24, "temperature": 0, **options}
    return client.chat.completions.create(**given)


def complete(client: OpenAI, **options):
    given = {"model": "tiny", "prompt": "the end", "max_tokens": 24, "temperature": 0, **options}
    return client.completions.create(**given)


def test_a_chat_is_answered(client: OpenAI) -> None:
    """The call that everybody makes first."""
    answer = chat(client)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_says_the_same(client: OpenAI) -> None:
    """Chunks put together are the answer, and its usage comes last."""
    whole = chat(client)
    with chat(client, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].model_extra["metrics"]["speculative_decoding"]["method"] == "suffix"


def test_the_clients_own_accumulator_agrees(client: OpenAI) -> None:
    """`chat.completions.stream` puts chunks together by the client's rules."""
    given = {"model": "tiny", "messages": ASK, "max_tokens": 12, "temperature": 0}
    with client.chat.completions.stream(**given, logprobs=True) as stream:
        for _ in stream:
            pass
        final = stream.current_completion_snapshot
    whole = chat(client, max_tokens=12, logprobs=True)
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert len(final.choices[0].logprobs.content) == whole.usage.completion_tokens


def test_an_echo_scores_the_prompt(client: OpenAI) -> None:
    """As evaluation harnesses ask: what was said of tokens as an answer is said of them as a prompt."""
    first = complete(client, prompt=[10, 20, 30, 40], max_tokens=20, logprobs=2, extra_body=IDS)
    said = first.choices[0]
    whole = [10, 20, 30, 40, *said.model_extra["token_ids"]]
    for stream in (False, True):
        given = {"prompt": whole, "max_tokens": 1, "logprobs": 2, "echo": True, "extra_body": IDS}
        if stream:
            with complete(client, stream=True, **given) as chunks:
                told = [
                    c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs
                ]
        else:
            told = [complete(client, **given).choices[0].logprobs]
        values = [value for one in told for value in one.token_logprobs]
        tops = [top for one in told for top in one.top_logprobs]
        assert len(values) == len(tops) == len(whole) + 1
        assert values[0] is tops[0] is None
        assert values[4 : len(whole)] == pytest.approx(said.logprobs.token_logprobs, abs=0.02)
        assert [name for one in told for name in one.tokens][4 : len(whole)] == said.logprobs.tokens
    extra = {**IDS, "prompt_logprobs": 20}  # vLLM's form of the same
    answer = complete(client, prompt=whole, max_tokens=1, extra_body=extra)
    first, *places = answer.choices[0].model_extra["prompt_logprobs"]
    assert first is None
    own = [place[str(token)] for token, place in zip(whole[1:], places, strict=True)]
    assert [one["logprob"] for one in own] == pytest.approx(values[1 : len(whole)], abs=0.02)
    for one, place in zip(own, places, strict=True):
        ranked = sorted(place.values(), key=lambda other: -other["logprob"])
        assert ranked[min(one["rank"], len(ranked)) - 1]["logprob"] == one["logprob"]


def test_the_async_client_asks_many_at_once(server) -> None:
    """They are decoded together, and each gets its own answer."""

    async def ask() -> list[str]:
        async with AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:

            async def one(i: int) -> str:
                stream = await client.completions.create(
                    model="tiny", prompt=[10 + i, 20, 30], max_tokens=16, temperature=0, stream=True
                )
                async with stream:
                    return "".join([c.choices[0].text async for c in stream if c.choices])

            together = await asyncio.gather(*(one(i) for i in range(12)))
            assert together == [await one(i) for i in range(12)]
            return together

    assert len(set(asyncio.run(ask()))) > 6


def test_logprobs_have_openais_forms(client: OpenAI) -> None:
    """Greedy decoding emits the likeliest, so it stands first among the alternatives."""
    told = chat(client, logprobs=True, top_logprobs=4).choices[0].logprobs.content
    for entry in told:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert len(entry.top_logprobs) == 4
    extra = {"return_tokens_as_token_ids": True}  # texts of tokens may be alike
    lists = complete(client, logprobs=3, extra_body=extra).choices[0].logprobs
    assert all(len(top) == 3 for top in lists.top_logprobs)
    assert lists.text_offset == sorted(lists.text_offset)


def test_seeds_repeat_and_samples_differ(client: OpenAI) -> None:
    """n samples of one seed, twice the same."""
    options = {"temperature": 1, "seed": 5, "n": 4, "max_tokens": 12}
    one, two = (chat(client, **options) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in two.choices]
    assert len(set(texts)) == 4
    assert [choice.index for choice in one.choices] == [0, 1, 2, 3]


def test_a_stop_string_ends_the_text(client: OpenAI) -> None:
    """It is not shown, in streams neither, though it may lie across chunks."""
    whole = complete(client).choices[0].text
    stop = whole[5:8]
    cut = complete(client, stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert cut.model_extra["stop_reason"] == stop
    with complete(client, stop=["never", stop], stream=True) as stream:
        assert "".join(c.choices[0].text for c in stream) == cut.text
    many = [f"never {i}" for i in range(99)]
    assert complete(client, stop=[*many, stop]).choices[0].text == cut.text


def test_prompts_come_in_lists_and_as_ids(client: OpenAI) -> None:
    """Answers keep the order of the prompts, whatever their shape."""
    ids = client.post("/../tokenize", body={"prompt": "the end"}, cast_to=object)["tokens"]
    one = complete(client).choices[0].text
    assert complete(client, prompt=ids).choices[0].text == one
    both = complete(client, prompt=["and", "the end"], n=2).choices
    assert [choice.index for choice in both] == [0, 1, 2, 3]
    assert both[2].text == both[3].text == one
    lists = complete(client, prompt=[ids, [5, 6]]).choices
    assert lists[0].text == one


def test_echo_and_token_ids_are_returned(client: OpenAI) -> None:
    """What was asked, in front; and the ids, which text cannot tell."""
    extra = {"return_token_ids": True, "skip_special_tokens": False}
    plain = complete(client, extra_body=extra).choices[0]
    echoed = complete(client, echo=True, extra_body=extra).choices[0]
    assert echoed.text == f"the end{plain.text}"
    ids = plain.model_extra["token_ids"]
    text = client.post("/../detokenize", body={"tokens": ids}, cast_to=object)["content"]
    assert text.removesuffix("<|im_end|>") == plain.text


def test_the_extra_fields_of_vllm_are_read(client: OpenAI) -> None:
    """They travel in extra_body."""
    extra = {"min_tokens": 9, "top_k": 5, "ignore_eos": True, "speculative": {"enabled": False}}
    answer = complete(client, max_tokens=9, extra_body=extra)
    assert answer.usage.completion_tokens == 9
    assert answer.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_models_are_listed(client: OpenAI) -> None:
    """Gateways ask for them first."""
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_extra["max_model_len"] == 1024
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


@pytest.mark.parametrize(
    "options,code,param",
    [
        ({"temperature": 3}, "400", "temperature"),
        ({"messages": []}, "400", "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "400", "messages"),
        ({"max_tokens": 5000}, "context_length_exceeded", "max_tokens"),
        (
            {"messages": [{"role": "user", "content": "a" * 2000}]},
            "context_length_exceeded",
            "messages",
        ),
        ({"logit_bias": {"272": 1}}, "400", "logit_bias"),
        ({"extra_body": {"guided_json": {}}}, "400", "guided_json"),
        ({"stream": True, "n": 0}, "400", "n"),
        ({"stream": True, "max_tokens": 5000}, "context_length_exceeded", "max_tokens"),
    ],
)
def test_mistakes_are_told(client: OpenAI, options, code, param) -> None:
    """As the client's own exceptions, with the field; for streams before anything is sent."""
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **options)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    """Served under one name, asked for by another."""
    with pytest.raises(openai.NotFoundError) as caught:
        chat(client, model="gpt-4")
    assert caught.value.code == "model_not_found"
    assert "tiny" in str(caught.value)


def test_structured_answers_are_what_was_asked(client: OpenAI) -> None:
    """A random model obeys a schema, a choice and a pattern."""
    import json

    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = chat(client, response_format=form, temperature=1, seed=1, max_tokens=900)
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"a", "b"}
    assert found["a"] in {1, 2}
    choice = complete(client, extra_body={"structured_outputs": {"choice": ["the", "and"]}})
    assert choice.choices[0].text in {"the", "and"}
    pattern = complete(client, extra_body={"structured_outputs": {"regex": "[0-9]{3}"}})
    assert pattern.choices[0].text.isdigit()
    assert len(pattern.choices[0].text) == 3
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, extra_body={"structured_outputs": {"regex": "("}})
    assert caught.value.param == "structured_outputs.regex"


@pytest.mark.parametrize("text", ["é 🙂 👩‍👩‍👧", "שלום עולם", "مرحبا", "日本語。"])
def test_characters_of_several_tokens_come_whole(client: OpenAI, text: str) -> None:
    """Every token of this model is a byte, so each of these characters is made over several steps."""
    extra = {"structured_outputs": {"choice": [text]}, "return_token_ids": True}
    stream = complete(client, max_tokens=60, extra_body=extra, stream=True)
    with stream:
        pieces = [c.choices[0].text for c in stream if c.choices]
    assert "".join(pieces) == text
    assert all(set(piece) <= set(text) for piece in pieces)  # no half of a character, ever
    whole = complete(client, max_tokens=60, extra_body=extra).choices[0]
    assert whole.text == text
    assert len(whole.model_extra["token_ids"]) >= len(text.encode())
    cut = complete(client, max_tokens=60, stop=[text[2]], extra_body=extra).choices[0]
    assert cut.text == text[:2]


def test_one_token_is_an_answer(client: OpenAI) -> None:
    """The shortest there is, whole and streamed."""
    for make in (chat, complete):
        answer = make(client, max_tokens=1)
        assert answer.usage.completion_tokens == 1
        assert answer.choices[0].finish_reason == "length"
        with make(client, max_tokens=1, stream=True) as stream:
            assert [c.choices[0].finish_reason for c in stream][-1] == "length"


def test_a_response_is_made_kept_and_forgotten(client: OpenAI) -> None:
    """Whole and streamed the same, with log-probabilities; then by its id, until it is deleted."""
    given = {"model": "tiny", "input": "the end", "max_output_tokens": 12, "temperature": 0}
    told = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    made = client.responses.create(**given, **told)
    assert made.usage.output_tokens == 12
    [part] = made.output[0].content
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in part.logprobs)
    with client.responses.stream(**given) as stream:
        events = list(stream)
    assert events[-1].type == "response.incomplete"  # the limit ended it
    final = events[-1].response
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == made.output_text
    assert client.responses.retrieve(final.id).output_text == made.output_text
    client.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(final.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**given, top_logprobs=21)
    assert caught.value.param == "top_logprobs"


def test_caches_are_shared_within_a_salt(client: OpenAI) -> None:
    """A prefix that one tenant has computed must not be noticed by another."""

    def cached(**extra) -> int:
        text = f"{type(client).__name__}: long enough to fill several pages of the cache "
        prompt = text * 2  # no other test's
        usage = complete(client, prompt=prompt, max_tokens=1, extra_body=extra).usage
        return usage.prompt_tokens_details.cached_tokens

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") > 64
    assert cached(cache_salt="b") == 0
    assert cached() == 0
    assert cached(cache_prompt=False) == 0
    assert cached() > 64
