from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import threading
import weakref
from collections.abc import Callable, Sequence

import pytest

from paceline.api.llm import LLM
from paceline.api.results import Chunk
from paceline.api.tokenizer import Tokenizer
from paceline.api.tokenizer_files import TokenizerParts
from paceline.core.errors import (
    ConfigError,
    EngineStoppedError,
    ModelError,
    PacelineError,
    RequestError,
    TemplateError,
)
from paceline.core.request import Request, SamplingParams
from tests import tiny
from tests.fake_engine import EOS, FakeEngine

TIMEOUT = 20.0


def make_tokenizer(*, template: bool = True) -> Tokenizer:
    return Tokenizer(
        TokenizerParts(
            backend=tiny.tiny_tokenizer(),
            named_tokens={"eos_token": "<|im_end|>"},
            eos_token_ids=(EOS,),
            chat_templates={"default": tiny.CHAT_TEMPLATE} if template else {},
        )
    )


TOKENIZER = make_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


class Setup:
    """An LLM over a fake engine."""

    def __init__(self, script: Sequence[int] | Callable[[Request, int], Sequence[int]], **options):
        self.engine = FakeEngine(script, **options)
        self.llm = LLM.from_engine(self.engine, TOKENIZER)


@pytest.fixture
def setup():
    made: list[LLM] = []

    def make(script, **options) -> Setup:
        found = Setup(script, **options)
        made.append(found.llm)
        return found

    yield make
    for llm in made:
        llm.close()


def echo(request: Request, seed: int) -> Sequence[int]:
    return [*request.prompt_ids, EOS]


# -- whole answers --------------------------------------------------------------------------------


def test_an_answer_carries_everything_that_was_promised(setup) -> None:
    """Text, ids, reason, statistics and seed come together."""
    llm = setup([*ids("the end of it"), EOS]).llm
    (result,) = llm.generate("abc", SamplingParams(seed=7))
    assert result.text == "the end of it"
    assert list(result.token_ids) == [*ids("the end of it"), EOS]
    assert (result.finish_reason, result.stop_reason, result.seed) == ("stop", None, 7)
    assert list(result.prompt_ids) == ids("abc")
    emitted = len(result.token_ids)
    assert result.accept_length == pytest.approx((emitted - 1) / result.stats.num_steps)
    assert sum(result.accept_histogram) == result.stats.num_steps
    assert len(result.sources) == emitted
    assert result.tokens_per_second == emitted  # the fake says one second
    assert result.logprobs is None


@pytest.mark.parametrize(
    "prompts,expected",
    [
        ("abc", ["abc"]),
        (["abc", "the"], ["abc", "the"]),
        (ids("abc"), ["abc"]),
        ([ids("abc"), "the", tuple(ids("xyz"))], ["abc", "the", "xyz"]),
        ([], []),
    ],
)
def test_prompts_come_in_many_shapes(setup, prompts, expected: list[str]) -> None:
    """Text, token ids, and lists of both; answers come in the prompts' order."""
    results = setup(echo).llm.generate(prompts)
    assert [r.text for r in results] == expected
    assert [r.prompt_index for r in results] == list(range(len(expected)))


@pytest.mark.parametrize("prompts", [["abc", 3], [b"abc"], [ids("a"), 4], [None], [{"role": 1}]])
def test_a_prompt_of_the_wrong_kind_is_refused(setup, prompts) -> None:
    """A number or bytes among prompts is a mistake, and named."""
    with pytest.raises(RequestError, match="a prompt is text or a list of token ids"):
        setup(echo).llm.generate(prompts)


def test_one_bad_prompt_starts_none_of_a_call(setup) -> None:
    """A call is all or nothing, and says which prompt is wrong; the next call is served."""
    found = setup(echo)
    with pytest.raises(RequestError, match="request 2 of 3: the prompt is empty"):
        found.llm.generate(["abc", "", "the"])
    assert [r.text for r in found.llm.generate("abc")] == ["abc"]


def test_samples_share_a_seed_and_differ_by_index(setup) -> None:
    """N samples of a prompt are one seed's, told apart by their index, in order."""
    found = setup(echo)
    results = found.llm.generate(["abc", "the"], SamplingParams(n=3))
    keys = [(r.prompt_index, r.sample_index) for r in results]
    assert keys == list(itertools.product(range(2), range(3)))
    seeds = [{r.seed for r in results if r.prompt_index == p} for p in range(2)]
    assert [len(s) for s in seeds] == [1, 1]
    assert seeds[0] != seeds[1]
    assert [r.sample_index for r in found.engine.added] == [0, 1, 2, 0, 1, 2]


def test_parameters_may_differ_by_prompt(setup) -> None:
    """A list of parameters goes with the prompts, one each; another number is refused."""
    llm = setup(ids("abcdefgh")).llm
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5)]
    assert [r.text for r in llm.generate(["x", "y"], params)] == ["ab", "abcde"]
    with pytest.raises(RequestError, match="3 prompts came with 2 sampling parameters"):
        llm.generate(["x", "y", "z"], params)


def test_what_ended_an_answer_is_told(setup) -> None:
    """Stop strings and stop ids are named; their text is left out unless it was asked for."""
    llm = setup([*ids("abc. the end"), EOS]).llm
    dot = ids(".")[0]
    (by_text,) = llm.generate("x", SamplingParams(stop=["c. t"]))
    assert (by_text.text, by_text.stop_reason) == ("ab", "c. t")
    (by_id,) = llm.generate("x", SamplingParams(stop_token_ids=[dot]))
    assert (by_id.text, by_id.stop_reason) == ("abc", dot)
    assert by_id.token_ids[-1] == dot
    (shown,) = llm.generate(
        "x", SamplingParams(stop_token_ids=[dot], include_stop_str_in_output=True)
    )
    assert shown.text == "abc."
    (on,) = llm.generate("x", SamplingParams(ignore_eos=True, max_tokens=15))
    assert on.finish_reason == "length"
    assert EOS in on.token_ids


def test_logprobs_come_with_the_tokens_text(setup) -> None:
    """Each token's log-probability and its alternatives, named."""
    llm = setup([*ids("the end"), EOS]).llm
    (result,) = llm.generate("x", SamplingParams(logprobs=2))
    assert result.logprobs is not None
    assert len(result.logprobs) == len(result.token_ids)
    first = result.logprobs[0]
    assert (first.token, first.logprob) == ("the", -0.5)
    assert [a.token_id for a in first.top] == [first.token_id, first.token_id + 1]
    (bare,) = llm.generate("x", SamplingParams(logprobs=0))
    assert bare.logprobs is not None
    assert bare.logprobs[0].top == ()


def test_chat_goes_through_the_template(setup) -> None:
    """One conversation or several; each is rendered and answered."""
    found = setup([*ids("the"), EOS])
    talk = [{"role": "user", "content": "abc"}]
    assert [r.text for r in found.llm.chat(talk)] == ["the"]
    assert [r.text for r in found.llm.chat([talk, talk])] == ["the", "the"]
    expected = TOKENIZER.encode_chat(talk)
    assert all(list(r.prompt_ids) == expected for r in found.engine.added)


def test_chat_without_a_template_says_so(setup) -> None:
    """A base model's chat is refused with the way out."""
    llm = LLM.from_engine(FakeEngine([EOS]), make_tokenizer(template=False))
    with llm, pytest.raises(TemplateError, match="no chat template"):
        llm.chat([{"role": "user", "content": "abc"}])


# -- answers in the making ------------------------------------------------------------------------


def test_chunks_add_up_to_the_answer(setup) -> None:
    """Streamed text and tokens, joined, are the result's; the result comes with the last chunk."""
    llm = setup([*ids("the end of it all"), EOS]).llm
    chunks = list(llm.iter_chunks("x"))
    result = chunks[-1].result
    assert result is not None
    assert all(c.result is None and c.finish_reason is None for c in chunks[:-1])
    assert chunks[-1].finish_reason == "stop"
    assert "".join(c.text for c in chunks) == result.text == "the end of it all"
    assert [t for c in chunks for t in c.token_ids] == list(result.token_ids)
    assert [s for c in chunks for s in c.sources] == list(result.sources)
    assert len(chunks) > 2


def test_leaving_a_stream_early_ends_its_request(setup) -> None:
    """A reader that goes away costs no further steps."""
    found = setup(ids("abc"))
    chunks = found.llm.iter_chunks("x", SamplingParams(max_tokens=100_000))
    next(chunks)
    chunks.close()
    found.llm.report()  # behind the abort in the loop's queue
    assert found.engine.aborted == [found.engine.added[0].id]


def test_async_stream_is_the_blocking_one(setup) -> None:
    """The same chunks through asyncio, several streams at once."""
    llm = setup(echo).llm

    async def read(prompt: str) -> list[Chunk]:
        return [chunk async for chunk in llm.stream(prompt)]

    async def main() -> list[list[Chunk]]:
        return await asyncio.gather(*(read(p) for p in ("abc", "the end", "xyz")))

    answers = asyncio.run(main())
    assert ["".join(c.text for c in a) for a in answers] == ["abc", "the end", "xyz"]
    assert all(a[-1].result is not None for a in answers)


def test_a_cancelled_stream_ends_its_request(setup) -> None:
    """Cancelling the task that reads aborts in the engine."""
    found = setup(ids("abc"))

    async def main() -> None:
        started = asyncio.Event()

        async def read() -> None:
            async for _ in found.llm.stream("x", SamplingParams(max_tokens=10_000_000)):
                started.set()

        task = asyncio.create_task(read())
        await asyncio.wait_for(started.wait(), TIMEOUT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    found.llm.report()
    assert len(found.engine.aborted) == 1


def test_a_refused_stream_raises_at_its_first_chunk(setup) -> None:
    """Errors of a streamed request reach whoever reads, in both kinds of stream."""
    llm = setup(echo).llm
    with pytest.raises(RequestError, match="the prompt is empty"):
        list(llm.iter_chunks(""))

    async def main() -> None:
        async for _ in llm.stream(""):
            pass

    with pytest.raises(RequestError, match="the prompt is empty"):
        asyncio.run(main())


# -- ends and errors ------------------------------------------------------------------------------


def test_ctrl_c_ends_what_was_submitted(setup) -> None:
    """After an interrupt the engine is free, and the LLM can be used again."""
    main = threading.main_thread().ident
    assert main is not None
    sent = threading.Event()

    def on_step(number: int) -> None:
        if number == 3:
            signal.pthread_kill(main, signal.SIGINT)
            sent.set()

    found = setup(ids("abc"), on_step=on_step)
    with pytest.raises(KeyboardInterrupt):
        found.llm.generate(["x", "y"], SamplingParams(max_tokens=100_000))
    assert sent.wait(TIMEOUT)
    found.llm.report()
    assert sorted(found.engine.aborted) == sorted(r.id for r in found.engine.added)
    assert [r.text for r in found.llm.generate("x", SamplingParams(max_tokens=3))] == ["abc"]


def test_a_broken_engine_ends_the_call(setup, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for an engine that has stopped."""

    def on_step(number: int) -> None:
        msg = "broken"
        raise ValueError(msg)

    llm = setup(echo, on_step=on_step).llm
    with pytest.raises(EngineStoppedError, match="broken"):
        llm.generate("abc")
    with pytest.raises(EngineStoppedError, match="broken"):
        llm.generate("abc")


def test_a_failure_in_making_text_reaches_its_caller(
    setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault above the engine ends its own request with an error, not with silence."""
    from paceline.api.completion import Completion

    accept = Completion.accept

    def broken(self: Completion, output):
        if list(self.request.prompt_ids) == ids("abc"):
            msg = "no such character"
            raise ValueError(msg)
        return accept(self, output)

    monkeypatch.setattr(Completion, "accept", broken)
    found = setup(echo)
    with pytest.raises(PacelineError, match="no such character"):
        found.llm.generate("abc")
    assert [r.text for r in found.llm.generate("the")] == ["the"]


def test_a_closed_llm_refuses_and_says_why(setup) -> None:
    """The context manager closes; what comes later hears that, however often one closes."""
    found = setup(echo)
    with found.llm as llm:
        llm.generate("abc")
    llm.close()
    with pytest.raises(EngineStoppedError, match="closed"):
        llm.generate("abc")
    assert len(found.engine.closed_by) == 1


def test_a_closed_llm_holds_no_memory() -> None:
    """Closing gives the engine's memory back even while the LLM is still at hand."""
    engine = FakeEngine(echo)
    gone = weakref.ref(engine)
    llm = LLM.from_engine(engine, TOKENIZER)
    llm.generate("abc")
    llm.close()
    del engine
    gc.collect()
    assert gone() is None
    with pytest.raises(EngineStoppedError, match="closed"):
        llm.report()


def test_a_forgotten_llm_stops_its_thread() -> None:
    """Without close() the garbage collector ends the loop."""
    engine = FakeEngine(echo)
    llm = LLM.from_engine(engine, TOKENIZER)
    llm.generate("abc")
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    assert len(engine.closed_by) == 1


def test_options_are_checked_before_anything_is_loaded() -> None:
    """A misspelt option, a drafter or a model nobody knows: each names what there is."""
    with pytest.raises(ConfigError, match="unknown option 'max_length'; did you mean 'max_len'"):
        LLM(max_length=3)
    with pytest.raises(ConfigError, match="known drafters: auto, none, ngram, suffix"):
        LLM(spec="medusa")
    with pytest.raises(ModelError, match="unknown model 'no/such/model'"):
        LLM("no/such/model")


def test_facts_and_counters_are_at_hand(setup) -> None:
    """Config, context window, notes and counters can be read from the LLM."""
    found = setup(echo)
    found.llm.generate("abc")
    assert found.llm.max_len == 200
    assert found.llm.notes == ("a note",)
    assert found.llm.report()["num_steps"] == found.engine.num_steps
