"""Every registered drafter network emits exactly the autoregressive tokens, and keeps a true cache.

As `test_drafters.py` for host drafters: losslessness is equality, in float64. Each network comes from
a builder in `tests/tiny_drafters.py`, trained until it half knows the answers, so that chains and trees
are accepted to all lengths. A new registry line needs a builder and runs through all of this.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.draft.base import Drafter
from paceline.engine.engine import Engine
from paceline.kv.pool import KVPool
from tests import network_cases, tiny_drafters
from tests.conformance.test_drafters import OPTIONS, PROMPTS, TEMPERATURES, autoregressive, params
from tests.engine.harness import Outcome, engine, request, run

CASES = network_cases.network_cases()
IDS = [network_cases.case_id(name, own) for name, own in CASES]


@pytest.fixture(params=CASES, ids=IDS)
def speculating(
    request: pytest.FixtureRequest, llama: Path, drafters: Callable[..., Path]
) -> Callable[..., Engine]:
    """Builds engines with one network after the other."""
    name, own = request.param
    folder = str(drafters(network_cases.network_in(name, own), llama))
    return lambda **options: engine(llama, method=name, model=folder, **{**own, **options})


def check(folder: Path, done: dict[str, Outcome], option: str, temperature: float) -> None:
    """Equal to autoregressive."""
    for name, outcome in done.items():
        expected = autoregressive(folder, name.split("/")[0], option, temperature)
        assert tuple(outcome.tokens) == expected, f"{name} differs from autoregressive"


def network_of(eng: Engine) -> Drafter:
    """The network in an engine, alone or as a part of what proposes."""
    parts = getattr(eng._proposer, "_parts", [eng._proposer])
    (drafter,) = [part._drafter for part in parts if part.observes]
    return drafter


def pool_of(eng: Engine) -> KVPool:
    """The drafter's own pool: networks keep their runtime, or what they are built on does."""
    drafter = network_of(eng)
    return getattr(drafter, "_block", drafter)._runtime._pool


class Watch:
    """After every step: each cached token of each running row has the entry of a fresh prefill."""

    def __init__(self, eng: Engine) -> None:
        self._eng = eng
        self._truth = tiny_drafters.TRUTHS[network_of(eng).spec.name]
        self.checked = 0

    def __call__(self, _: int) -> None:
        eng = self._eng
        drafter, net = network_of(eng), eng._launcher._target.net
        pool = pool_of(eng)
        for sequence in eng._scheduler.running:
            count = sequence.num_cached
            if count == 0:
                continue
            slots = eng._rows.slots(torch.full((count,), sequence.row), torch.arange(count))
            known = sequence.tokens[: count + eng.spec.lookahead]
            for layer, (k, v) in enumerate(self._truth(drafter, net, known)):
                for mine, true in ((pool.k, k), (pool.v, v)):
                    entry = mine[layer][:, slots].transpose(0, 1)
                    torch.testing.assert_close(entry, true, rtol=1e-9, atol=1e-9)
            self.checked += count


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("option", OPTIONS)
def test_alone(
    llama: Path, speculating: Callable[..., Engine], option: str, temperature: float
) -> None:
    """Alone, one request after the other, with every kind of option."""
    eng = speculating()
    for prompt, ids in PROMPTS.items():
        done = run(eng, [request(prompt, ids, params(option, temperature))])
        check(llama, done, option, temperature)
    report = eng.report()
    assert report["spec_decode_num_draft_tokens"] > 0, "nothing was drafted: no test at all"
    assert report["spec_decode_num_accepted_tokens"] > 0, "nothing was accepted: half a test"


@pytest.mark.parametrize("option", OPTIONS)
def test_mixed_batch(llama: Path, speculating: Callable[..., Engine], option: str) -> None:
    """In a batch with rows of other options, temperatures and lengths, joining and leaving."""
    temperature = 0.7
    eng = speculating()
    others = [
        request(
            f"x{i}",
            PROMPTS[p],
            SamplingParams(max_tokens=5 + 9 * i, seed=i, ignore_eos=True, temperature=i % 2),
        )
        for i, p in enumerate(PROMPTS)
    ]
    mine = [request(p, PROMPTS[p], params(option, temperature)) for p in PROMPTS]
    done = run(eng, [r for pair in zip(others, mine, strict=True) for r in pair])
    check(llama, {k: v for k, v in done.items() if k in PROMPTS}, option, temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_true_cache(
    llama: Path, speculating: Callable[..., Engine], temperature: float, adaptive: bool
) -> None:
    """Chunks, prefix hits, preemption, suspended drafting: after every step the draft cache holds
    what a fresh prefill of the row's tokens would write.
    """
    eng = speculating(num_pages=24, max_len=80, chunk_size=7, adaptive=adaptive)
    watch = Watch(eng)
    for repeat in range(2):
        todo = [request(f"{p}/{repeat}", PROMPTS[p], params("plain", temperature)) for p in PROMPTS]
        check(llama, run(eng, todo, on_step=watch), "plain", temperature)
    assert watch.checked > 300
    assert eng.report()["num_preemptions"] > 0, "nobody was preempted"


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_prefix_hit(llama: Path, speculating: Callable[..., Engine], temperature: float) -> None:
    """A prompt's second request takes its pages from the cache, emits the same tokens, and accepts
    as many drafts per step as it would without the cache.
    """
    steps = {}
    for cached in (True, False):
        eng = speculating(prefix_cache=cached)
        for repeat in range(2):
            name = f"long/{repeat}"
            done = run(eng, [request(name, PROMPTS["long"], params("plain", temperature))])
            check(llama, done, "plain", temperature)
            stats = done[name].last.stats
            assert stats is not None
            assert stats.num_cached_tokens == (44 if cached and repeat else 0)
            steps[cached, repeat] = stats.num_steps
    assert steps[True, 1] == steps[False, 1], "drafts are worse after a prefix hit"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_shared_pages_are_never_touched(
    llama: Path, speculating: Callable[..., Engine], temperature: float
) -> None:
    """Draft scratch and commits leave pages that other rows share bit for bit unchanged."""
    eng = speculating()
    run(eng, [request("first", PROMPTS["long"], params("plain", temperature))])
    pool = pool_of(eng)
    pages = eng._scheduler._prefix.match(PROMPTS["long"], "")
    eng._scheduler._allocator.release(pages)  # stay cached: there is room for all
    slots = [p * 4 + i for p in pages for i in range(4)]
    before = pool.k[:, :, slots].clone(), pool.v[:, :, slots].clone()
    run(
        eng,
        [request(str(i), PROMPTS["long"], params("plain", temperature)) for i in range(3)],
        on_step=lambda _: None,
    )
    assert len(slots) == 44
    assert torch.equal(pool.k[:, :, slots], before[0])
    assert torch.equal(pool.v[:, :, slots], before[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_twins_in_one_step(
    llama: Path, speculating: Callable[..., Engine], temperature: float
) -> None:
    """Two equal prompts admitted in one step do not read each other's unwritten pages."""
    twins = [
        request(f"{p}/{i}", PROMPTS[p], params("plain", temperature))
        for p in ("long", "mixed")
        for i in range(2)
    ]
    check(llama, run(speculating(), twins), "plain", temperature)


@pytest.mark.parametrize("chunk_size", [1, 5, 16])
def test_chunked_prefill(llama: Path, speculating: Callable[..., Engine], chunk_size: int) -> None:
    """Prompts computed in chunks, other rows decoding in between: every chunk's features count, so
    as many drafts are accepted as after a prefill in one piece.
    """
    steps = []
    for size in (chunk_size, 512):
        eng = speculating(chunk_size=size)
        for p in PROMPTS:
            check(llama, run(eng, [request(p, PROMPTS[p], params("plain", 0.0))]), "plain", 0.0)
        steps.append(eng.report()["num_block_steps"])
    assert steps[0] == steps[1], "drafts are worse after a chunked prefill"


def test_context_end(llama: Path, speculating: Callable[..., Engine]) -> None:
    """Drafts at the edge of the context window are cut; the last token is the autoregressive one."""
    prompt, long = PROMPTS["loop"], params("plain", 0.0, max_tokens=500)
    plain = run(engine(llama, method="none", max_len=48), [request("a", prompt, long)])["a"]
    spec = run(speculating(max_len=48), [request("a", prompt, long)])["a"]
    assert spec.tokens == plain.tokens
    assert len(spec.tokens) == 48 - len(prompt)


def test_end_of_positions(llama: Path, speculating: Callable[..., Engine]) -> None:
    """The target's whole window is served, past the length that the drafter was made for (128)."""
    prompt, long = PROMPTS["loop"] * 8, params("plain", 0.0, max_tokens=500)
    options = {"max_len": 256, "num_pages": 90}
    plain = run(engine(llama, method="none", **options), [request("a", prompt, long)])["a"]
    eng = speculating(**options)
    watch = Watch(eng)
    spec = run(eng, [request("a", prompt, long)], on_step=watch)["a"]
    assert spec.tokens == plain.tokens
    assert len(spec.tokens) == 256 - len(prompt)
    assert watch.checked > 128


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_per_request_cap(llama: Path, speculating: Callable[..., Engine], cap: int) -> None:
    """`num_speculative_tokens` of a request caps its draft nodes; 0 turns speculation off."""
    capped = params("plain", 0.0, num_speculative_tokens=cap)
    done = run(speculating(), [request("loop", PROMPTS["loop"], capped)])
    check(llama, done, "plain", 0.0)
    stats = done["loop"].last.stats
    assert stats is not None
    assert stats.num_drafted <= cap * stats.num_steps
    assert (stats.num_drafted > 0) == (cap > 0)
