"""Drafter networks in the engine: trees of any shape, and a draft cache that is always true."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline import draft
from paceline.core.registry import Registry
from paceline.core.request import SamplingParams
from paceline.engine.engine import Engine
from tests import tiny, tiny_drafters
from tests.engine.as_on_gpu import grower_of
from tests.engine.harness import engine, request, run
from tests.engine.scribe import TAPS, Scribe

PROMPTS = [
    [11, 12, 13, 14, 15] * 4,
    [31, 7, 7, 7, 9, 31, 7],
    [5],
    [(3 * i) % 23 + 3 for i in range(33)],
]
KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 9, "frequency_penalty": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.2, "logit_bias": {12: 1.5}},
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=3)


@pytest.fixture(autouse=True)
def scribe_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry line for the tests' own network."""
    lines = {"scribe": "tests.engine.scribe:Scribe"}
    monkeypatch.setattr(draft, "NETWORKS", Registry("drafter", lines))
    return


def scribe_of(eng: Engine) -> Scribe:
    """The tests' drafter inside an engine."""
    drafter = eng._proposer._drafter
    assert isinstance(drafter, Scribe)
    return drafter


def check_cache(eng: Engine) -> int:
    """Every cached token of every running row has its true entry in the draft cache."""
    rows, target = eng._rows, eng._launcher._target
    checked = 0
    for sequence in eng._scheduler.running:
        count = sequence.num_cached
        if count == 0:
            continue
        places = torch.arange(count)
        slots = rows.slots(torch.full((count,), sequence.row), places)
        entries = scribe_of(eng).runtime._pool.k[0, 0, slots]
        after = sequence.tokens[1 : count + 1]
        assert entries[:, 0].long().tolist() == sequence.tokens[:count], "token of an entry"
        assert entries[: len(after), 1].long().tolist() == after, "token after an entry"
        assert entries[:, 2].long().tolist() == list(range(count)), "position of an entry"
        expected = _taps(target.net, sequence.tokens[:count])
        torch.testing.assert_close(entries[:, 3], expected, rtol=1e-9, atol=1e-9)
        checked += count
    return checked


def _taps(net: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Sum of tapped features [n] of a fresh pass over the tokens."""
    from tests.dense import DenseAttend, whole

    return net(whole(tokens), DenseAttend(), TAPS).aux.double().sum(1).detach()


@pytest.mark.parametrize("kind", KINDS, ids=["greedy", "sampled", "filtered", "penalised"])
@pytest.mark.parametrize("pages", [None, 26], ids=["room", "tight"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_random_trees_are_lossless_and_observed_truly(
    model: Path, kind: dict[str, object], pages: int | None, adaptive: bool
) -> None:
    """Random trees, batches, prefix hits, chunks and preemption: tokens equal autoregressive ones,
    and after every step the draft cache is what a fresh prefill would write.
    """
    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=6, **kind)
    plain = engine(model, method="none")
    expected = {
        str(i): run(plain, [request(str(i), p, params)])[str(i)].tokens
        for i, p in enumerate(PROMPTS)
    }
    eng = engine(
        model, method="scribe", num_pages=pages, max_len=72, chunk_size=7, adaptive=adaptive
    )
    for tokens, prompt in zip(expected.values(), PROMPTS, strict=True):
        text = prompt[-1:] + tokens
        for before, after in itertools.pairwise(text):
            scribe_of(eng).hints.setdefault(before, []).append(after)
    checked = 0

    def watch(_: int) -> None:
        nonlocal checked
        checked += check_cache(eng)

    for repeat in range(2):
        jobs = [request(f"{i}/{repeat}", p, params) for i, p in enumerate(PROMPTS)]
        done = run(eng, jobs, on_step=watch)
        for name, outcome in done.items():
            assert outcome.tokens == expected[name[0]], f"{name} differs from autoregressive"
    report = eng.report()
    assert checked > 0
    assert report["spec_decode_num_accepted_tokens"] > 0, "no path was ever accepted"
    assert pages is None or report["num_preemptions"] > 0


def test_shared_pages_are_never_touched(model: Path) -> None:
    """Draft scratch and commits of one row leave the pages that another row shares unchanged."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
    eng = engine(model, method="scribe")
    run(eng, [request("a", PROMPTS[3], params)])
    pool = scribe_of(eng).runtime._pool
    pages = eng._scheduler._prefix.match(PROMPTS[3], "")
    eng._scheduler._allocator.release(pages)  # stay cached: there is room for all
    slots = [p * 4 + i for p in pages for i in range(4)]
    before = pool.k[:, :, slots].clone()
    assert len(slots) == 32
    run(eng, [request(str(i), PROMPTS[3], params) for i in range(3)])
    assert torch.equal(pool.k[:, :, slots], before)


def test_a_tree_that_the_host_never_sees_is_counted_alike(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    """As on a GPU, where a network's tree is not read: what was verified comes with the results."""
    monkeypatch.undo()  # the real registry
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    jobs = [request(str(i), p, params) for i, p in enumerate(PROMPTS)]
    plain = run(engine(model, method="none"), jobs)
    texts = [p + plain[str(i)].tokens for i, p in enumerate(PROMPTS)]
    folder = tiny_drafters.overfit_dflash(tmp_path / "drafter", model, texts)
    for method in ("ddtree", "dflash"):  # a chain's tensors are views, one line for all rows
        found = []
        for hidden in (False, True):
            eng = engine(model, method=method, model=str(folder))
            if hidden:
                eng._proposer.grower = grower_of(eng._proposer, 4)
            done = run(eng, jobs)
            sources = {n: [s for out in o.outputs for s in out.sources] for n, o in done.items()}
            found.append((eng.counters.num_accepted_tokens, sources))
            assert eng.counters.num_draft_tokens >= eng.counters.num_accepted_tokens
        assert found[0] == found[1]
        assert found[0][0] > 0
        assert {s for each in found[0][1].values() for s in each} == {0, 4}
