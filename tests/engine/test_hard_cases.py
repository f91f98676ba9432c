"""What must not stop, poison or leak through an engine: bad requests, bad weights, storms."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from paceline.core.errors import ConfigError, RequestError
from paceline.core.request import FinishReason, SamplingParams
from tests.engine.harness import engine, request, run
from tests.tiny import write_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def test_stop_ids_outside_the_vocabulary_stop_nothing(folder: Path) -> None:
    """A checkpoint may name an end-of-text id that no token has; the engine must not fail on it."""
    eng = engine(folder)
    odd = frozenset({-5, 97, 10**30})
    plain = request("plain", [5, 6], GREEDY)
    strange = request("strange", [5, 6], SamplingParams(temperature=0.0, max_tokens=12))
    object.__setattr__(strange, "stop_ids", odd)
    done = run(eng, [plain, strange])
    assert done["strange"].tokens == done["plain"].tokens


@pytest.mark.parametrize("bad", ["x", 2.0, None, True])
def test_ids_that_are_no_whole_numbers_are_refused(folder: Path, bad: object) -> None:
    """Anything but a whole number in a prompt is a RequestError, and nothing is queued."""
    eng = engine(folder)
    with pytest.raises(RequestError, match="whole number"):
        eng.add(request("bad", [5, bad, 6], GREEDY))
    assert not eng.has_work


@pytest.mark.parametrize("method", ["none", "suffix"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_request_with_nan_does_not_poison_others(tmp_path: Path, dtype: str, method: str) -> None:
    """NaN keys and values of a neighbour, or left in reused pages, must not reach other rows."""
    broken = write_tiny(tmp_path)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.embed_tokens.weight"][50] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, banned_token_ids=[50, 0]
    )
    options = {"dtype": dtype, "method": method, "num_pages": 30, "max_len": 60, "max_rows": 3}
    good = [request(f"good{i}", [5 + i, 6, 7, 8, 9], params) for i in range(3)]
    alone = run(engine(broken, **options), good)
    eng = engine(broken, **options)
    run(eng, [request(f"nan{i}", [50] * 40, params) for i in range(4)])  # NaN in every page
    mixed = [r for i, g in enumerate(good) for r in (request(f"b{i}", [50, 5, 6], params), g)]
    done = run(eng, mixed)
    for item in good:
        assert done[item.id].tokens == alone[item.id].tokens


@pytest.mark.parametrize(
    "name,value", [("threads", 10**6), ("max_rows", 10**9), ("memory_gb", 1e308)]
)
def test_sizes_beyond_any_machine_are_refused(folder: Path, name: str, value: float) -> None:
    """What would end the process (threads, rows) or overflow is a message before the model loads."""
    with pytest.raises(ConfigError, match=f"{name} .* above the limit"):
        engine(folder, **{name: value})


HARD = [
    {"repetition_penalty": 1e-6, "presence_penalty": 2, "frequency_penalty": -2},
    {"repetition_penalty": 1e6, "banned_token_ids": [5, 6, 7]},
    {"logit_bias": {i: (-1) ** i * 100 for i in range(97)}},
    {"allowed_token_ids": [9]},
    {"top_p": 1e-9},
    {"top_p": 5e-324, "min_p": 5e-324},
    {"min_p": 1.0},
    {"top_k": (1 << 63) - 1, "min_tokens": 20},
    {"num_speculative_tokens": 0, "logprobs": 20},
    {"num_speculative_tokens": 1, "logprobs": 0},
    {"stop_token_ids": list(range(3, 60)), "min_tokens": 3},
    {"temperature": 1e-9},
    {"temperature": 5e-324},
    {"temperature": 100},
    {"seed": -(1 << 63)},
    {"seed": (1 << 63) - 1},
]
SIZES = {
    "page size 1, chunk 1, one row": {
        "page_size": 1,
        "chunk_size": 1,
        "max_rows": 1,
        "max_len": 48,
    },
    "preempting": {"page_size": 4, "chunk_size": 3, "max_rows": 4, "num_pages": 15, "max_len": 48},
    "255 nodes": {
        "num_speculative_tokens": 255,
        "suffix_max_spec_factor": 50.0,
        "suffix_min_token_prob": 0.0,
        "max_len": 48,
    },
    "no nodes": {"num_speculative_tokens": 0, "max_len": 48},
}


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("size", SIZES)
def test_extreme_options_at_odd_sizes_are_lossless(folder: Path, size: str, method: str) -> None:
    """Options at the ends of their ranges give the autoregressive tokens at any size."""
    base = [random.Random(5).randrange(3, 97) for _ in range(9)]
    requests = [
        request(
            f"r{i}",
            (base * 6)[: 46 if i % 5 == 4 else 3 * i % 25 + 1],
            SamplingParams(**{"max_tokens": 22, "temperature": 0.9, "seed": i, **options}),
            scope="ab"[i % 2],
            sample_index=i % 3,
        )
        for i, options in enumerate(HARD)
    ]
    plain = run(engine(folder, method="none", prefix_cache=False, max_len=48), requests)
    drafted = run(engine(folder, method=method, **SIZES[size]), requests)
    for item in requests:
        assert drafted[item.id].tokens == plain[item.id].tokens, item.params
        assert drafted[item.id].last.finish_reason == plain[item.id].last.finish_reason


def test_a_banned_token_stays_banned_at_any_penalty(folder: Path) -> None:
    """The penalties' extremes must not turn -inf into something that can be emitted."""
    for dtype in ("float32", "float64"):
        for penalty in (1e-6, 1e6):
            eng = engine(folder, dtype=dtype)
            params = SamplingParams(
                repetition_penalty=penalty,
                banned_token_ids=[5, 6, 7],
                max_tokens=30,
                ignore_eos=True,
                seed=0,
            )
            assert not {5, 6, 7} & set(run(eng, [request("a", [5, 6, 7], params)])["a"].tokens)


def test_a_storm_of_aborts_leaves_nothing(folder: Path) -> None:
    """Adding and aborting at random leaks no row, page or option slot, and each request ends once."""
    rng = random.Random(3)
    eng = engine(folder, method="suffix", max_rows=2, num_pages=50)
    open_ids: set[str] = set()
    ends: list[str] = []
    count = 0
    for step in range(300):
        if rng.random() < 0.6:
            params = SamplingParams(max_tokens=1 + rng.randrange(20), frequency_penalty=count % 2)
            eng.add(request(f"{count}", [3 + count % 4] * (1 + rng.randrange(40)), params))
            open_ids.add(f"{count}")
            count += 1
        while open_ids and (rng.random() < 0.3 or step > 280):
            eng.abort(rng.choice(sorted(open_ids)))
            if step > 280:
                break
        for out in eng.step():
            if out.finish_reason is not None:
                open_ids.discard(out.request_id)
                ends.append(out.request_id)
        eng.check_integrity()
    for name in sorted(open_ids):
        eng.abort(name)
    while eng.has_work:
        ends += [out.request_id for out in eng.step() if out.finish_reason is not None]
    eng.check_integrity()
    assert sorted(ends, key=int) == [f"{i}" for i in range(count)]
    assert eng.num_running == eng.num_waiting == 0


def test_many_requests_on_two_rows_all_end(folder: Path) -> None:
    """A queue far longer than the rows is served to its end, in bounded memory."""
    eng = engine(folder, max_rows=2, num_pages=60)
    many = [
        request(f"{i}", [3 + i % 5] * (1 + i % 20), SamplingParams(max_tokens=1 + i % 5, seed=i))
        for i in range(200)
    ]
    done = run(eng, many)
    assert len(done) == 200
    assert {o.last.finish_reason for o in done.values()} <= {FinishReason.STOP, FinishReason.LENGTH}
