"""The Python interface and the commands over the real engine, in this process, on tiny checkpoints."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.cli import main
from paceline.core.errors import RequestError
from paceline.core.request import Fault

SMALL = {
    "max_len": 200,
    "max_rows": 4,
    "page_size": 4,
    "dtype": "float64",
    "adaptive": False,
    "threads": 1,
}
TEXT = "the and of the and on the and of the and"


@pytest.fixture(scope="module", params=["ngram", "suffix:path", "suffix:tree"])
def llm(request: pytest.FixtureRequest, tiny_checkpoint):
    with LLM(str(tiny_checkpoint("llama")), spec=request.param, **SMALL) as found:
        yield found


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_drafts_change_no_token(llm: LLM, temperature: float) -> None:
    """Whole answers, text and ids, with the drafter equal those without, options and all."""
    drafted = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=40,
            repetition_penalty=1.1 if seed % 2 else 1.0,
            logit_bias={10: 1.5} if seed % 3 else {},
            stop=["of"] if seed == 4 else (),
        )
        for seed in range(5)
    ]
    plain = [replace(p, num_speculative_tokens=0) for p in drafted]
    one, other = llm.generate([TEXT] * 5, drafted), llm.generate([TEXT] * 5, plain)
    assert [r.token_ids for r in one] == [r.token_ids for r in other]
    assert [(r.text, r.finish_reason, r.stop_reason) for r in one] == [
        (r.text, r.finish_reason, r.stop_reason) for r in other
    ]
    assert all(r.accept_length == 1.0 and r.stats.num_drafted == 0 for r in other)
    assert sum(r.stats.num_drafted for r in one) > 0


def test_seeds_repeat_and_tell_apart(llm: LLM) -> None:
    """Unseeded answers differ and carry the seed that repeats them; samples of a seed differ."""
    params = SamplingParams(max_tokens=24)
    free = llm.generate([TEXT] * 5, params)
    assert len({r.token_ids for r in free}) == 5
    assert len({r.seed for r in free}) == 5
    for result in free:
        (again,) = llm.generate(TEXT, replace(params, seed=result.seed))
        assert again.token_ids == result.token_ids
    four = llm.generate(TEXT, replace(params, n=4, seed=3))
    assert len({r.token_ids for r in four}) == 4
    alone = llm.generate(TEXT, replace(params, n=4, seed=3, num_speculative_tokens=0))
    assert [r.token_ids for r in four] == [r.token_ids for r in alone]


def test_streams_are_the_whole_answer(llm: LLM) -> None:
    """Blocking, streamed and awaited answers to one seed are the same, several at once."""
    params = SamplingParams(max_tokens=30, seed=5)
    (whole,) = llm.generate(TEXT, params)
    chunks = list(llm.iter_chunks(TEXT, params))
    assert "".join(c.text for c in chunks) == whole.text
    assert tuple(t for c in chunks for t in c.token_ids) == whole.token_ids

    async def read() -> str:
        return "".join([c.text async for c in llm.stream(TEXT, params)])

    async def both() -> list[str]:
        return await asyncio.gather(read(), read())

    assert asyncio.run(both()) == [whole.text, whole.text]


def test_a_constraint_holds_in_every_way_to_ask(llm: LLM) -> None:
    """Of the model's own compiler: answers match, with the drafter as without, however they are asked for."""
    pattern = r"(the|of|on)( (the|of|on|and|ing|er)){2,14}\."
    held = llm.constraints.regex(pattern)
    assert llm.constraints is llm.constraints
    drafted = SamplingParams(temperature=1.0, seed=4, max_tokens=60, n=2)
    plain = replace(drafted, num_speculative_tokens=0)
    answers = llm.generate([TEXT, "of the"], drafted, constraint=held)
    assert all(r.finish_reason == "stop" and re.fullmatch(pattern, r.text) for r in answers)
    wanted = llm.generate([TEXT, "of the"], plain, constraint=held)
    assert [r.token_ids for r in answers] == [r.token_ids for r in wanted]
    [free] = llm.generate(TEXT, replace(drafted, n=1))
    assert free.token_ids != answers[0].token_ids

    one = replace(drafted, n=1)
    [whole] = llm.generate(TEXT, one, constraint=held)
    assert "".join(c.text for c in llm.iter_chunks(TEXT, one, constraint=held)) == whole.text

    async def read() -> str:
        return "".join([c.text async for c in llm.stream(TEXT, one, constraint=held)])

    assert asyncio.run(read()) == whole.text
    [told] = llm.chat([{"role": "user", "content": "the"}], one, constraint=held)
    assert re.fullmatch(pattern, told.text)


def test_a_contradicted_constraint_is_the_requests_fault(llm: LLM) -> None:
    """The result says whose fault it is; the others of the call are whole."""
    held = llm.constraints.choice(["the", "on"])
    other = llm.tokenizer.encode("of", add_special_tokens=False)
    one = SamplingParams(temperature=0.0, max_tokens=9)
    good, bad = llm.generate(
        [TEXT, TEXT], [one, replace(one, allowed_token_ids=other)], constraint=held
    )
    assert (good.text in {"the", "on"}, good.fault) == (True, None)
    assert (bad.finish_reason, bad.fault) == ("error", Fault.REQUEST)
    assert bad.error is not None
    assert "allowed_token_ids and the grammar leave no token" in bad.error


def test_logprobs_are_the_same_with_drafts(llm: LLM) -> None:
    """Log-probabilities belong to the model, so a drafter changes none of them."""
    params = SamplingParams(max_tokens=20, seed=6, logprobs=3)
    (one,) = llm.generate(TEXT, params)
    (other,) = llm.generate(TEXT, replace(params, num_speculative_tokens=0))
    assert one.logprobs is not None
    assert other.logprobs is not None
    assert len(one.logprobs) == len(one.token_ids)
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-9)
        assert [t.token_id for t in a.top] == [t.token_id for t in b.top]
        assert len(a.top) == 3
        assert a.logprob <= a.top[0].logprob + 1e-12


def test_a_bad_request_disturbs_nobody(llm: LLM) -> None:
    """A prompt beyond the context window is refused with numbers, while another is answered."""
    params = SamplingParams(max_tokens=30, seed=7)
    (expected,) = llm.generate(TEXT, params)
    chunks = llm.iter_chunks(TEXT, params)
    first = next(chunks)
    with pytest.raises(RequestError, match="context window of 200"):
        llm.generate("the " * 300)
    with pytest.raises(RequestError, match="outside the vocabulary of 97"):
        llm.generate([5, 97])
    with pytest.raises(RequestError, match="empty"):
        llm.generate("")
    rest = list(chunks)
    assert "".join(c.text for c in [first, *rest]) == expected.text


def test_chat_answers(llm: LLM) -> None:
    """A conversation goes through the checkpoint's own template."""
    talk = [{"role": "user", "content": "the end"}]
    (result,) = llm.chat(talk, SamplingParams(max_tokens=8, temperature=0))
    assert list(result.prompt_ids) == llm.tokenizer.encode_chat(talk)
    assert result.finish_reason in {"stop", "length"}


# -- commands -------------------------------------------------------------------------------------

FLAGS = (
    "--threads",
    "1",
    "--dtype",
    "float64",
    "--max-len",
    "200",
    "--page-size",
    "4",
    "--no-adaptive",
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "plain.jsonl"
    rows = [{"prompt": TEXT, "category": "copy"}, {"prompt": "and so on", "category": "other"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_check_lossless(
    tiny_checkpoint, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every drafter's tokens are the autoregressive tokens, alone and together; a record says so."""
    out = tmp_path / "record.json"
    specs = ("--spec", "ngram", "--spec", "suffix:path", "--spec", "suffix:tree")
    model = ("--model", str(tiny_checkpoint("qwen3")))
    for concurrency in ("1", "2"):
        code = main(
            [
                "check",
                "lossless",
                prompts,
                *model,
                *FLAGS,
                *specs,
                "--max-tokens",
                "24",
                "--concurrency",
                concurrency,
                "--out",
                str(out),
            ]
        )
        assert code == 0, capsys.readouterr().err
    record = json.loads(out.read_text())
    assert record["equal"] is True
    assert len(record["results"]) == 6
    assert record["config"]["dtype"] == "float64"


def test_bench(tiny_checkpoint, prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of several drafters over one loaded model, outputs equal, steps counted."""
    code = main(
        [
            "bench",
            prompts,
            "--model",
            str(tiny_checkpoint("llama")),
            *FLAGS,
            "--max-tokens",
            "16",
            "--spec",
            "none",
            "--spec",
            "suffix",
            "--repeats",
            "2",
            "--raw",
        ]
    )
    captured = capsys.readouterr()
    assert code == 0, captured.err
    none, suffix = json.loads(captured.out.splitlines()[-1])["results"]
    for result in (none, suffix):
        everything = result["groups"][-1]
        assert everything["num_equal"] == everything["num_compared"] == 4
        assert everything["speed_ratio"] > 0
    assert none["groups"][-1]["accept_length"] == 1.0
    assert none["groups"][-1]["accept_rate"] is None


def test_demo(tiny_checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo's two answers are equal, and it says so."""
    code = main(
        ["demo", "the end", "--model", str(tiny_checkpoint("llama")), *FLAGS, "--max-tokens", "8"]
    )
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "The outputs are equal" in captured.out


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--model", "no/such/model"], "unknown model 'no/such/model'"),
        (["--spec", "medusa"], "known drafters: auto, none, ngram, suffix"),
        (["--model", "TINY", "--memory-gb", "0.0001"], "memory"),
        (["--model", "TINY", "--max-len", "100000"], "positions end at 256"),
        (["--model", "TINY", "--banned-token-ids", "97"], "outside the vocabulary of 97"),
    ],
)
def test_what_cannot_be_served_is_one_message(
    tiny_checkpoint, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, what is possible, no traceback."""
    tiny = str(tiny_checkpoint("llama"))
    assert (
        main(
            ["generate", "the", "--threads", "1", *(tiny if a == "TINY" else a for a in arguments)]
        )
        == 2
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("paceline: ")
