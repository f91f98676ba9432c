"""One request's life: stops and limits, seeds, logprobs, refusals, other people's failures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paceline.core import device
from paceline.core.errors import (
    ConfigError,
    EngineStoppedError,
    MemoryBudgetError,
    RequestError,
)
from paceline.core.request import FinishReason, SamplingParams
from paceline.engine.engine import Engine
from paceline.ops.cpu import native
from tests import tiny
from tests.engine.harness import engine, request, run

PROMPT = [11, 12, 13, 14, 15] * 4 + [11, 12]
METHODS = ["none", "ngram", "suffix"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=2)


def plain(model: Path, **values: object) -> list[int]:
    """Autoregressive tokens of PROMPT."""
    merged = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, **values}
    return run(engine(model, method="none"), [request("p", PROMPT, SamplingParams(**merged))])[
        "p"
    ].tokens


class StopAfter:
    """A stopper that finds its "string" complete at the n-th emitted token."""

    def __init__(self, count: int) -> None:
        self.left = count

    def feed(self, token_ids: Sequence[int]) -> int | None:
        if len(token_ids) >= self.left:
            return self.left
        self.left -= len(token_ids)
        return None


class Broken:
    """A stopper that fails."""

    def feed(self, token_ids: Sequence[int]) -> int | None:
        msg = "no more"
        raise RuntimeError(msg)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [1, 2, 5, 11, 29])
def test_stop_id_cuts_the_block(model: Path, method: str, at: int) -> None:
    """Nothing past a stop id is shown, counted or cached, wherever in a block it falls."""
    expected = plain(model)
    stop = expected[at]
    first = expected.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
    eng = engine(model, method=method)
    done = run(eng, [request("r", PROMPT, params)])["r"]
    assert done.tokens == expected[: first + 1]
    assert done.last.finish_reason is FinishReason.STOP
    assert done.last.stop_token_id == stop
    assert done.last.stats is not None
    assert done.last.stats.num_output_tokens == first + 1
    again = run(eng, [request("s", PROMPT + done.tokens, SamplingParams(max_tokens=3, seed=1))])
    fresh = run(
        engine(model, method="none"),
        [request("s", PROMPT + done.tokens, SamplingParams(max_tokens=3, seed=1))],
    )
    assert again["s"].tokens == fresh["s"].tokens, "what was cached past the stop must not be used"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [1, 3, 8, 30])
def test_stop_string_cuts_the_block(model: Path, method: str, at: int) -> None:
    """A stop string that completes inside a block ends the request there; the string wins over
    the length limit when both fall on the same token.
    """
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    done = run(engine(model, method=method), [request("r", PROMPT, params, stopper=StopAfter(at))])
    assert done["r"].tokens == plain(model)[:at]
    assert done["r"].last.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 13])
def test_max_tokens_is_exact(model: Path, method: str, max_tokens: int) -> None:
    """A block never runs past max_tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    done = run(engine(model, method=method), [request("r", PROMPT, params)])["r"]
    assert done.tokens == plain(model)[:max_tokens]
    assert done.last.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("method", METHODS)
def test_long_stop_lists(model: Path, method: str) -> None:
    """Stop ids beyond those that fit the device's list are honoured too."""
    expected = plain(model)
    last = expected[9]
    others = [i for i in range(40, 97) if i not in expected]
    params = SamplingParams(
        temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=(*others, last)
    )
    done = run(engine(model, method=method), [request("r", PROMPT, params)])["r"]
    assert done.tokens == expected[: expected.index(last) + 1]


def test_failing_stopper_ends_its_own_request_only(model: Path) -> None:
    """Somebody's broken matcher is an error of that request; others go on undisturbed."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    done = run(
        engine(model, method="suffix"),
        [request("bad", PROMPT, params, stopper=Broken()), request("good", PROMPT, params)],
    )
    assert done["bad"].last.finish_reason is FinishReason.ERROR
    assert "no more" in (done["bad"].last.error or "")
    assert done["good"].tokens == plain(model)


def test_seed_repeats_a_request(model: Path) -> None:
    """A seeded request gives the same tokens first, after 100 others, and beside others."""
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=42)
    eng = engine(model, method="suffix", max_rows=8)
    first = run(eng, [request("first", PROMPT, params)])["first"].tokens
    others = [
        request(f"o{i}", [3 + i % 50, 4], SamplingParams(max_tokens=3, ignore_eos=True))
        for i in range(100)
    ]
    run(eng, others)
    beside = run(eng, [*others[:3], request("again", PROMPT, params)])
    assert beside["again"].tokens == first


def test_unseeded_requests_differ_and_report_their_seed(model: Path) -> None:
    """Five unseeded requests differ; the seed in the statistics repeats each of them."""
    eng = engine(model, method="suffix", seed=None, max_rows=8)
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    done = run(eng, [request(str(i), PROMPT, params) for i in range(5)])
    assert len({tuple(d.tokens) for d in done.values()}) == 5
    for outcome in done.values():
        assert outcome.last.stats is not None
        repeat = SamplingParams(
            temperature=1.0, max_tokens=16, ignore_eos=True, seed=outcome.last.stats.seed
        )
        assert run(eng, [request("x", PROMPT, repeat)])["x"].tokens == outcome.tokens


@pytest.mark.parametrize("method", METHODS)
def test_samples_of_one_prompt_differ(model: Path, method: str) -> None:
    """N = 4 with one seed: four different answers, each equal to autoregressive."""
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, seed=9)
    jobs = [request(str(i), PROMPT, params, sample_index=i) for i in range(4)]
    done = run(engine(model, method=method), jobs)
    assert len({tuple(d.tokens) for d in done.values()}) == 4
    for job in jobs:
        alone = run(engine(model, method="none"), [job])[job.id].tokens
        assert done[job.id].tokens == alone


@pytest.mark.parametrize("method", METHODS)
def test_logprobs_equal_autoregressive(model: Path, method: str) -> None:
    """Logprobs are of the emitted tokens, from the target, and the same with every drafter."""
    params = SamplingParams(
        temperature=0.7, max_tokens=20, ignore_eos=True, seed=3, logprobs=4, top_k=10
    )
    wanted = run(engine(model, method="none"), [request("r", PROMPT, params)])["r"]
    got = run(engine(model, method=method), [request("r", PROMPT, params)])["r"]
    expected = [lp for out in wanted.outputs for lp in out.logprobs or ()]
    entries = [lp for out in got.outputs for lp in out.logprobs or ()]
    assert len(entries) == len(got.tokens) == 20
    for a, b in zip(entries, expected, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-9)
        assert list(a.top_ids) == list(b.top_ids)
        assert len(a.top_ids) == 4
        assert max(a.top_logprobs) == a.top_logprobs[0]


def test_abort_frees_everything_and_says_so(model: Path) -> None:
    """Aborts while waiting, prefilling and decoding; unknown ids are ignored."""
    eng = engine(model, method="suffix", max_rows=2, chunk_size=4)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for i in range(4):
        eng.add(request(str(i), PROMPT, params))
    eng.step()
    for name in ("0", "3", "nobody"):
        eng.abort(name)
    outputs = [out for _ in range(3) for out in eng.step()]
    aborted = {o.request_id for o in outputs if o.finish_reason is FinishReason.ABORT}
    assert aborted == {"0", "3"}
    eng.check_integrity()
    while eng.has_work:
        eng.step()
    assert eng.num_running == 0


@pytest.mark.parametrize(
    "prompt, values, message",
    [
        ([], {}, "prompt is empty"),
        ([97], {}, "outside the vocabulary"),
        ([-1], {}, "outside the vocabulary"),
        ([5] * 160, {}, "context window of 160"),
        ([5], {"logit_bias": {97: 1.0}}, "logit_bias"),
        ([5], {"stop_token_ids": (100,)}, "stop_token_ids"),
        ([5], {"allowed_token_ids": (5,), "banned_token_ids": (5,)}, "also banned"),
        ([5], {"banned_token_ids": tuple(range(97))}, "whole vocabulary"),
        ([5], {"min_tokens": 3, "stop_token_ids": tuple(range(97))}, "is a stop id, which min_"),
        (
            [5],
            {
                "min_tokens": 3,
                "stop_token_ids": tuple(range(40)),
                "banned_token_ids": tuple(range(39, 97)),
            },
            "every token id that is not banned is a stop id",
        ),
    ],
)
def test_refused_requests(
    model: Path, prompt: list[int], values: dict[str, object], message: str
) -> None:
    """What cannot be served is refused when it is added, and nothing of it stays."""
    eng = engine(model, method="suffix")
    with pytest.raises(RequestError, match=message):
        eng.add(request("r", prompt, SamplingParams(**values)))
    assert not eng.has_work
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    assert run(eng, [request("r", PROMPT, params)])["r"].tokens == plain(model)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": float("inf")}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"stop": ("",)}, "non-empty"),
        ({"n": 0}, "n 0"),
        ({"logprobs": 21}, "logprobs"),
        ({"seed": 1 << 63}, "seed"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
    ],
)
def test_refused_sampling_values(values: dict[str, object], message: str) -> None:
    """Out-of-range values are refused with their name; several at once are all named."""
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


def test_all_sampling_problems_are_named() -> None:
    """A request with two mistakes hears of both."""
    with pytest.raises(RequestError, match=r"(?s)temperature.*top_p"):
        SamplingParams(temperature=-1.0, top_p=2.0)


def test_duplicate_ids_are_refused(model: Path) -> None:
    """Two open requests cannot share an id."""
    eng = engine(model)
    eng.add(request("r", PROMPT, SamplingParams()))
    with pytest.raises(RequestError, match="in use"):
        eng.add(request("r", PROMPT, SamplingParams()))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"method": "eagle9"}, ConfigError, "none, ngram, suffix"),
        ({"max_len": 400}, MemoryBudgetError, "positions"),
        ({"num_pages": 3, "max_len": 100}, MemoryBudgetError, r"max_len <= .* \(or num_pages\)$"),
        ({"memory_gb": 1e-6}, MemoryBudgetError, r"give more memory_gb \(or num_pages\)$"),
        ({"max_rows": 0}, ConfigError, "max_rows"),
        ({"num_speculative_tokens": 256}, ConfigError, "limit of 255; ask for 255 or fewer"),
        ({"max_rows": 1 << 20}, ConfigError, "limit of 65536; ask for 65536 or fewer"),
        ({"method": "suffix", "model": "folder"}, ConfigError, "'suffix' uses no folder"),
        ({"device": "tpu"}, ConfigError, "cuda"),
    ],
)
def test_refused_configurations(
    model: Path, options: dict[str, object], error: type[Exception], message: str
) -> None:
    """What cannot be served is refused at start with what is possible."""
    with pytest.raises(error, match=message):
        engine(model, **options)


def test_prompt_of_the_whole_window(model: Path) -> None:
    """A prompt one token shorter than the window emits exactly one token."""
    prompt = [(i * 7) % 50 + 3 for i in range(159)]
    for method in METHODS:
        done = run(engine(model, method=method), [request("r", prompt, SamplingParams(seed=1))])
        assert len(done["r"].tokens) == 1
        assert done["r"].last.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_one_row_and_one_thread_of_everything(model: Path) -> None:
    """The smallest engine serves requests one after the other."""
    eng = engine(model, method="suffix", max_rows=1, page_size=1, chunk_size=1)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    done = run(eng, [request(str(i), PROMPT, params) for i in range(3)])
    assert all(d.tokens == plain(model) for d in done.values())


def test_engines_share_a_loaded_model(model: Path) -> None:
    """Two engines over one set of weights do not disturb each other."""
    first = engine(model, method="suffix")
    second = Engine.build(first.config, loaded=first.loaded)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for eng in (first, second, first):
        assert run(eng, [request("r", PROMPT, params)])["r"].tokens == plain(model)
    assert torch.equal(
        next(iter(first.loaded.net.parameters())), next(iter(second.loaded.net.parameters()))
    )


def test_a_closed_engine_takes_nothing(model: Path) -> None:
    """Closing drops what is open at once and refuses what comes later."""
    eng = engine(model)
    eng.add(request("r", PROMPT, SamplingParams()))
    eng.step()
    eng.close()
    assert not eng.has_work
    with pytest.raises(EngineStoppedError, match="closed"):
        eng.add(request("s", PROMPT, SamplingParams()))


def test_a_stated_budget_counts_work_space(model: Path) -> None:
    """With a memory budget a warm step runs first, so its work space is part of what is in use."""
    eng = engine(model, memory_gb=8.0, max_len=64)
    assert any("memory budget 8 GB" in note for note in eng.notes)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    assert run(eng, [request("r", PROMPT, params)])["r"].tokens == plain(model)


def test_invariance_is_said_and_refused_where_it_cannot_be(model: Path) -> None:
    """The notes say whether bits depend on company; asking for the impossible is refused."""
    eng = engine(model)
    assert eng.config.batch_invariant is False, "float64 is served by the reference"
    assert any(note.startswith("batch-invariant: no") for note in eng.notes)
    with pytest.raises(ConfigError, match="batch_invariant was asked for"):
        engine(model, batch_invariant=True)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_slower_number_format_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """A processor without bfloat16 products: the notes say so, unless float32 was asked for."""
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset({"avx2"}))
    monkeypatch.setattr(native, "refusal", lambda dtype: "no compiler")
    eng = engine(model, dtype=dtype)
    assert eng.config.dtype == "float32"
    said = any("AVX512-BF16" in n and "float32 is used" in n for n in eng.notes)
    assert said == (dtype == "auto")
