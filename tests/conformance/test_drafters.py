"""Every registered drafter emits exactly the autoregressive tokens, whatever happens around it.

Losslessness is equality, in float64, so that no product of another shape can flip an argmax. A new
registry line runs through all of this by itself.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from paceline.core.request import SamplingParams
from paceline.draft import COMPOSITES, DRAFTERS
from tests import tiny, tiny_drafters
from tests.engine.harness import Outcome, engine, request, run

SPECULATING = [name for name in DRAFTERS if name != "none"]
# One matching token is enough to draft, so that every case below drafts something.
MERGED = [(name, parts) for name in COMPOSITES for parts in tiny_drafters.HOST_PARTS[name]]
VARIANTS = [
    *((name, {"prompt_lookup_min": 1}) for name in SPECULATING),
    ("suffix", {"suffix_shape": "path"}),
    *((name, {"prompt_lookup_min": 1, **parts}) for name, parts in MERGED),
]
VARIANT_IDS = [
    *SPECULATING,
    "suffix-path",
    *("-".join([name, *parts["parts"]]) for name, parts in MERGED),
]

PROMPTS = {
    "loop": [11, 12, 13, 14, 15] * 5 + [11, 12],
    "mixed": [31, 7, 7, 7, 9, 31, 7, 7, 8, 40, 41, 42, 31, 7, 7],
    "short": [5],
    "long": [(7 * i * i + 3 * i) % 23 + 3 for i in range(45)],
}
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "min_p": {"min_p": 0.08},
    "bias": {"logit_bias": {20: 2.5, 21: -100.0, 33: 1.0}},
    "top_k_p": {"top_k": 12, "top_p": 0.8},
    "tokens": {"allowed_token_ids": tuple(range(2, 60)), "banned_token_ids": (7, 9)},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": (14, 7, 20)},
}
TEMPERATURES = [0.0, 0.7, 1.0]


def params(option: str, temperature: float, seed: int = 3, **extra: object) -> SamplingParams:
    values: dict[str, object] = {"max_tokens": 28, "ignore_eos": True, "seed": seed}
    return SamplingParams(temperature=temperature, **{**values, **OPTIONS[option], **extra})


@functools.cache
def autoregressive(folder: Path, prompt: str, option: str, temperature: float) -> tuple[int, ...]:
    """Tokens of plain decoding, alone in a fresh engine."""
    eng = engine(folder, method="none")
    done = run(eng, [request("ar", PROMPTS[prompt], params(option, temperature))])
    return tuple(done["ar"].tokens)


def check(folder: Path, done: dict[str, Outcome], option: str, temperature: float) -> None:
    for name, outcome in done.items():
        prompt = name.split("/")[0]
        expected = autoregressive(folder, prompt, option, temperature)
        assert tuple(outcome.tokens) == expected, f"{name} differs from autoregressive"


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name, draft", VARIANTS, ids=VARIANT_IDS)
def test_alone(
    llama: Path, name: str, draft: dict[str, object], option: str, temperature: float
) -> None:
    """Alone, one request after the other (the later ones may learn from the earlier)."""
    eng = engine(llama, method=name, **draft)
    for prompt, ids in PROMPTS.items():
        done = run(eng, [request(prompt, ids, params(option, temperature))])
        check(llama, done, option, temperature)
    assert eng.report()["spec_decode_num_draft_tokens"] > 0, "nothing was drafted: no test at all"


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name, draft", VARIANTS, ids=VARIANT_IDS)
def test_mixed_batch(
    llama: Path, name: str, draft: dict[str, object], option: str, temperature: float
) -> None:
    """In a batch with rows of other options, other lengths, joining and leaving."""
    eng = engine(llama, method=name, **draft)
    others = [
        request(f"x{i}", PROMPTS[p], SamplingParams(max_tokens=5 + 9 * i, seed=i, ignore_eos=True))
        for i, p in enumerate(PROMPTS)
    ]
    mine = [request(p, PROMPTS[p], params(option, temperature)) for p in PROMPTS]
    order = [r for pair in zip(others, mine, strict=True) for r in pair]
    done = run(eng, order)
    check(llama, {k: v for k, v in done.items() if k in PROMPTS}, option, temperature)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("option", ["plain", "penalties", "top_k_p"])
@pytest.mark.parametrize("name, draft", VARIANTS, ids=VARIANT_IDS)
def test_preempted(
    llama: Path, name: str, draft: dict[str, object], option: str, temperature: float
) -> None:
    """A pool too small for all rows: sequences are preempted, recompute, and do not notice."""
    eng = engine(llama, method=name, num_pages=24, max_len=80, prefix_cache=False, **draft)
    done = run(eng, [request(p, PROMPTS[p], params(option, temperature)) for p in PROMPTS])
    check(llama, done, option, temperature)
    assert eng.report()["num_preemptions"] > 0, "nobody was preempted: no test at all"


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name, draft", VARIANTS, ids=VARIANT_IDS)
def test_prefix_hit(llama: Path, name: str, draft: dict[str, object], temperature: float) -> None:
    """The second request of a prompt takes its pages from the cache and emits the same tokens."""
    eng = engine(llama, method=name, **draft)
    first = run(eng, [request("long", PROMPTS["long"], params("plain", temperature))])
    again = run(eng, [request("long/2", PROMPTS["long"], params("plain", temperature))])
    check(llama, first | again, "plain", temperature)
    stats = again["long/2"].last.stats
    assert stats is not None
    assert stats.num_cached_tokens == 44, "the second prompt must compute its last page only"


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name, draft", VARIANTS, ids=VARIANT_IDS)
def test_twins_in_one_step(
    llama: Path, name: str, draft: dict[str, object], temperature: float
) -> None:
    """Two equal prompts admitted in one step do not read each other's unwritten pages."""
    eng = engine(llama, method=name, **draft)
    twins = [
        request(f"{p}/{i}", PROMPTS[p], params("plain", temperature))
        for p in ("long", "mixed")
        for i in range(2)
    ]
    check(llama, run(eng, twins), "plain", temperature)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("chunk_size", [1, 5, 16])
@pytest.mark.parametrize("name, draft", VARIANTS, ids=VARIANT_IDS)
def test_chunked_prefill(
    llama: Path, name: str, draft: dict[str, object], chunk_size: int, temperature: float
) -> None:
    """Prompts computed in chunks, other rows decoding in between."""
    eng = engine(llama, method=name, chunk_size=chunk_size, **draft)
    done = run(eng, [request(p, PROMPTS[p], params("plain", temperature)) for p in PROMPTS])
    check(llama, done, "plain", temperature)


@pytest.fixture(scope="session", params=list(tiny.VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of every architecture and option, one after the other."""
    return tiny.write_variant(tmp_path_factory.mktemp("variant"), request.param)


@pytest.mark.parametrize("name, draft", VARIANTS, ids=VARIANT_IDS)
def test_every_architecture(checkpoint: Path, name: str, draft: dict[str, object]) -> None:
    """Each architecture and option of a checkpoint, greedy and sampled."""
    eng = engine(checkpoint, method=name, **draft)
    for temperature in (0.0, 1.0):
        todo = [
            request(f"{p}/{temperature}", ids, params("plain", temperature))
            for p, ids in PROMPTS.items()
        ]
        check(checkpoint, run(eng, todo), "plain", temperature)


@pytest.mark.parametrize("name, draft", VARIANTS, ids=VARIANT_IDS)
def test_context_end(llama: Path, name: str, draft: dict[str, object]) -> None:
    """Drafts at the edge of the context window are cut; the last token is the autoregressive one."""
    prompt = PROMPTS["loop"]
    long = params("plain", 0.0, max_tokens=500)
    plain = run(engine(llama, method="none", max_len=48), [request("a", prompt, long)])["a"]
    spec = run(engine(llama, method=name, max_len=48, **draft), [request("a", prompt, long)])["a"]
    assert spec.tokens == plain.tokens
    assert len(spec.tokens) == 48 - len(prompt)


@pytest.mark.parametrize("name, draft", VARIANTS, ids=VARIANT_IDS)
@pytest.mark.parametrize("cap", [0, 1, 3])
def test_per_request_cap(llama: Path, name: str, draft: dict[str, object], cap: int) -> None:
    """`num_speculative_tokens` of a request caps its draft nodes; 0 turns speculation off."""
    eng = engine(llama, method=name, **draft)
    capped = params("plain", 0.0, num_speculative_tokens=cap)
    done = run(eng, [request("loop", PROMPTS["loop"], capped)])
    check(llama, done, "plain", 0.0)
    stats = done["loop"].last.stats
    assert stats is not None
    assert stats.num_drafted <= cap * stats.num_steps
    assert (stats.num_drafted > 0) == (cap > 0)
