from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.sample import noise, rowwise
from paceline.sample.options import SamplingTable
from paceline.sample.rowwise import draw
from paceline.sample.verifier import verify, verify_device
from tests.oracle import sampling as oracle
from tests.oracle import tree as tree_oracle
from tests.oracle.goodness import chi2
from tests.oracle.toy import Row, ToyModel, Verify, decode

V = 4
PROMPT = [1, 2]
BIG = 151_936


def law_of(model: ToyModel, params: SamplingParams, length: int) -> dict[object, float]:
    """The target's joint law of the first tokens, by the chain rule."""
    law: dict[object, float] = {}
    for text in itertools.product(range(V), repeat=length):
        p = 1.0
        for i, token in enumerate(text):
            logits = model.table[model.hidden([*PROMPT, *text[:i]])].tolist()
            z = oracle.process(logits, params, prompt=PROMPT, output=text[:i])
            p *= math.exp(z[token]) / sum(map(math.exp, z))
        if p > 0:
            law[text] = p
    return law


def drafter(rng: random.Random) -> object:
    """Random trees: what is drafted depends on the text only, as for any real drafter."""
    return lambda text: tree_oracle.random_proposal(rng, rng.randint(0, 6), V)


def emitted(model: ToyModel, params: SamplingParams, way: Verify, n: int) -> list[object]:
    """The first three tokens of n requests that differ in their seeds only."""
    out: list[object] = []
    rng = random.Random(3)
    for start in range(0, n, 100):
        rows = [
            Row(prompt=PROMPT, params=params, seed=seed, propose=drafter(rng))
            for seed in range(start, start + 100)
        ]
        decode(model, rows, way, slots=100)
        out += [tuple(row.output) for row in rows]
        assert max(len(row.counts) for row in rows) <= 2
    return out


@pytest.mark.parametrize("way", [verify, verify_device])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "top_k": 3},
        {"presence_penalty": 1.0, "min_p": 0.05, "top_p": 0.9},
    ],
    ids=["T=1", "T=0.7, top_k", "penalty, min_p, top_p"],
)
def test_emitted_tokens_have_the_targets_law(options: dict[str, float], way: Verify) -> None:
    """Lossless in law: accepted drafts and bonus tokens together are the target's own sequence."""
    model = ToyModel(V, spread=1.0)
    params = SamplingParams(**options, max_tokens=3)
    n = 1200
    assert abs(chi2(emitted(model, params, way, n), law_of(model, params, 3), n)) < 5


def biased(model: ToyModel, rng: random.Random) -> object:
    """The published mistake: min(1, p / q) for children that were not drawn from q.

    The drafter proposes its likeliest token for sure, yet the rule divides by its softmax.
    """
    text: list[int] = []
    while len(text) < 3:
        p = torch.softmax(model.table[model.hidden([*PROMPT, *text])], 0).tolist()
        q = torch.softmax(torch.tensor(p) * 3, 0).tolist()
        child = q.index(max(q))
        if rng.random() < p[child] / q[child]:
            text.append(child)
            continue
        rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        text.append(rng.choices(range(V), rest)[0])
    return tuple(text)


def test_the_same_test_rejects_a_biased_rule() -> None:
    """A χ² test that accepts everything proves nothing."""
    model = ToyModel(V, spread=1.0)
    rng = random.Random(1)
    n = 1200
    law = law_of(model, SamplingParams(), 3)
    assert chi2([biased(model, rng) for _ in range(n)], law, n) > 20
    fair = rng.choices(list(law), list(law.values()), k=n)
    assert abs(chi2(fair, law, n)) < 5


def tail(n: int) -> list[int]:
    """Draws from one token of mass 1/2 before 151,935 of equal mass, at V = 152 thousand."""
    logits = torch.zeros(BIG)
    logits[0] = math.log(BIG - 1)
    table = SamplingTable(1, BIG, "cpu", 0)
    table.assign(
        0,
        SamplingParams(),
        seed=99,
        sample_index=0,
        prompt_ids=[],
        output_ids=[],
        stop_ids=[],
        limit=10**9,
    )
    return [
        draw(
            logits,
            row=0,
            position=i,
            num_output=i,
            path_tokens=(),
            allowed=None,
            table=table,
        )
        for i in range(n)
    ]


def bins(tokens: Sequence[int]) -> list[object]:
    """Token 0 by itself, the tail in 32 equal parts."""
    return [-1 if t == 0 else (t - 1) * 32 // (BIG - 1) for t in tokens]


TAIL_LAW: dict[object, float] = {-1: 0.5, **dict.fromkeys(range(32), 1 / 64)}


def test_a_diffuse_tail_keeps_its_mass() -> None:
    """Half of the law lies on 151,935 tokens: coarse noise would lose them, or prefer low ids."""
    n = 1000
    assert abs(chi2(bins(tail(n)), TAIL_LAW, n)) < 5


def test_the_tail_test_rejects_coarse_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """With uniforms of 12 bits the largest noise ties and the lowest id wins."""

    def coarse(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return noise.gumbel((bits & ~0xFFFFF) | 0x80000, dtype)

    monkeypatch.setattr(rowwise, "gumbel", coarse)
    n = 1000
    assert chi2(bins(tail(n)), TAIL_LAW, n) > 20


def test_a_drafter_with_the_same_noise_matches_more_often() -> None:
    """Shared noise is the point of keying it: two close laws then choose the same token mostly.

    The bound is (1 - d) / (1 + d) for total variation d (arXiv 2408.07978); with noise of its own
    the drafter matches as rarely as two independent draws do.
    """
    gen = torch.Generator().manual_seed(0)
    target = torch.randn(200, generator=gen) * 1.5
    draft = target + torch.randn(200, generator=gen) * 0.3
    p, q = torch.softmax(target, 0), torch.softmax(draft, 0)
    distance = float((p - q).abs().sum()) / 2
    ids = torch.arange(200, dtype=torch.int32)
    n, shared, own = 2000, 0, 0
    key, other = noise.noise_key(5, 0), noise.noise_key(6, 0)
    for position in range(n):
        g = noise.gumbel(noise.hash_row(ids, noise.noise_words(key, position)), torch.float32)
        h = noise.gumbel(noise.hash_row(ids, noise.noise_words(other, position)), torch.float32)
        token = int((target + g).argmax())
        shared += token == int((draft + g).argmax())
        own += token == int((draft + h).argmax())
    bound = (1 - distance) / (1 + distance)
    assert shared / n > bound - 3 * math.sqrt(bound * (1 - bound) / n)
    assert shared / n < 1 - distance + 0.03
    assert own / n < 0.2 < shared / n
