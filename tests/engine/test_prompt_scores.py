"""Log-probabilities of a prompt's tokens: those of a plain pass over it, however it was prefilled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from paceline.core.errors import RequestError
from paceline.core.request import SamplingParams, StepOutput, TokenLogprobs
from paceline.engine.engine import Engine
from tests import tiny
from tests.dense import DenseAttend, whole
from tests.engine.as_on_gpu import as_on_gpu
from tests.engine.harness import Outcome, engine, request, run
from tests.tiny_drafters import write_dflash

PROMPTS = {
    "long": [(7 * i * i + 3 * i) % 90 + 3 for i in range(45)],
    "loop": [11, 12, 13, 14, 15] * 4,
    "two": [31, 7],
    "one": [5],
}
PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint."""
    return tiny.write_tiny(tmp_path_factory.mktemp("llama"), "llama", seed=3)


@cache
def expected(eng: Engine, name: str) -> torch.Tensor:
    """Log-probabilities [n - 1, V] of what follows each prefix: one dense pass, no cache."""
    net = eng._launcher._target.net
    hidden = net(whole(PROMPTS[name]), DenseAttend(), ()).hidden
    return net.head(hidden).double().log_softmax(1)[:-1].detach()


def check(
    eng: Engine, name: str, told: Sequence[TokenLogprobs | None] | None, num_top: int
) -> None:
    """Every token but the first, and the likeliest in its place, best first."""
    prompt, truth = PROMPTS[name], expected(eng, name)
    assert told is not None
    assert len(told) == len(prompt)
    assert told[0] is None
    for row, token, one in zip(truth, prompt[1:], told[1:], strict=True):
        assert one is not None
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-9)
        assert one.rank == 1 + int((row > row[token]).sum())
        assert len(one.top_ids) == len(one.top_logprobs) == num_top
        best = row.topk(num_top)
        assert list(one.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-9)
        assert list(one.top_ids) == best.indices.tolist()


def outputs(done: Outcome) -> list[StepOutput]:
    first, *others = done.outputs
    assert all(out.prompt_logprobs is None for out in others), "told once"
    return [first]


@pytest.mark.parametrize("method", ["none", "suffix", "ddtree"])
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("chunk_size", [7, 512])
def test_they_are_those_of_a_plain_pass(
    model: Path, tmp_path: Path, method: str, gpu: bool, chunk_size: int
) -> None:
    """In chunks, several prompts in a pass, beside requests that do not ask; the answers are as without."""
    network = {"model": str(write_dflash(tmp_path / "net", model))} if method == "ddtree" else {}
    eng = engine(model, method=method, chunk_size=chunk_size, **network)
    if gpu:
        as_on_gpu(eng)
    plain = run(eng, [request(name, prompt, PARAMS) for name, prompt in PROMPTS.items()])
    wanted = {"long": 3, "loop": 0, "two": 20, "one": 5}
    asked = [request(n, p, PARAMS, prompt_logprobs=wanted[n]) for n, p in PROMPTS.items()]
    done = run(eng, [request("silent", PROMPTS["long"], PARAMS), *asked])
    for name, num_top in wanted.items():
        (first,) = outputs(done[name])
        check(eng, name, first.prompt_logprobs, num_top)
        assert done[name].tokens == plain[name].tokens
        stats = done[name].last.stats
        assert stats is not None
        assert stats.num_cached_tokens == 0, "what is cached has no logits"
    (first,) = outputs(done["silent"])
    assert first.prompt_logprobs is None


def test_a_prompt_that_loses_its_pages_is_scored_as_a_whole(model: Path) -> None:
    """Preempted within its prompt, or after: it is told once, completely."""
    eng = engine(model, method="suffix", chunk_size=6, num_pages=26, max_len=72)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    asked = [
        request(f"{name}{i}", PROMPTS[name], params, prompt_logprobs=2)
        for i in range(3)
        for name in ("long", "loop")
    ]
    lost: set[str] = set()

    def lose(_: int) -> None:
        """Every prompt once, when a part of it is cached and scored."""
        for sequence in list(eng._scheduler.running):
            known = sequence.num_cached and not sequence.num_emitted
            if known and not sequence.in_flight and sequence.request.id not in lost:
                lost.add(sequence.request.id)
                eng._scheduler._preempt(sequence)

    done = run(eng, asked, on_step=lose)
    assert len(lost) == len(asked)
    assert eng.report()["num_preemptions"] > len(lost), "nobody lost its pages later"
    for item in asked:
        (first,) = outputs(done[item.id])
        check(eng, item.id[:-1], first.prompt_logprobs, 2)


@pytest.mark.parametrize("asked", [-1, 21])
def test_more_alternatives_than_there_may_be(model: Path, asked: int) -> None:
    """As for an answer's own."""
    with pytest.raises(RequestError, match=r"must be None or 0 \.\.\. 20"):
        engine(model, method="none").add(request("a", [5], PARAMS, prompt_logprobs=asked))
