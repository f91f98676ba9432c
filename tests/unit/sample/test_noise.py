from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.sample.noise import (
    gumbel,
    hash_row,
    hash_tokens,
    noise_key,
    noise_words,
    noise_words_of,
)
from tests.oracle import sampling as oracle

BIG = 151_936


def uniforms(keys: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """One number in (0, 1) for each (key, position, token); all [n]."""
    words = noise_words_of(keys, positions)
    bits = hash_tokens(tokens.to(torch.int32).unsqueeze(1), words)[:, 0]
    return (bits.view(torch.uint32).to(torch.float64) + 0.5) * 2.0**-32


def chi2(counts: Tensor, expected: float) -> float:
    """Pearson's statistic in standard deviations from its mean."""
    df = counts.numel() - 1
    stat = float(((counts.to(torch.float64) - expected) ** 2 / expected).sum())
    return (stat - df) / math.sqrt(2 * df)


def test_noise_is_the_formula_of_the_docstring() -> None:
    """Other implementations (kernels, drafters) follow the formula; a slip would part them."""
    rng = random.Random(0)
    for _ in range(300):
        seed = rng.choice([0, -1, 7, rng.getrandbits(63), -rng.getrandbits(63)])
        index, position, token = rng.randrange(8), rng.randrange(1 << 20), rng.randrange(BIG)
        key = noise_key(seed, index)
        assert key % 2**64 == oracle.key(seed, index)
        words = noise_words(key, position)
        bits = hash_row(torch.tensor([token], dtype=torch.int32), words)
        assert int(bits) % 2**32 == oracle.bits(key, position, token)
        exact = oracle.gumbel(key, position, token)
        assert float(gumbel(bits, torch.float64)) == pytest.approx(exact, rel=1e-12)
        assert float(gumbel(bits, torch.float32)) == pytest.approx(exact, rel=3e-6, abs=3e-6)


def test_host_and_device_words_are_the_same() -> None:
    """A CPU keys noise on the host, a GPU on the device; a request may meet both."""
    rng = random.Random(1)
    keys = [noise_key(rng.getrandbits(64), rng.randrange(4)) for _ in range(200)]
    positions = [rng.randrange(1 << 17) for _ in keys]
    words = noise_words_of(torch.tensor(keys), torch.tensor(positions))
    host = [noise_words(k, p) for k, p in zip(keys, positions, strict=True)]
    assert [tuple(w) for w in words.tolist()] == host
    ids = torch.arange(1000, dtype=torch.int32)
    batch = hash_tokens(ids, words)
    for i, pair in enumerate(host):
        assert torch.equal(hash_row(ids, pair), batch[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_a_token_does_not_depend_on_its_company(dtype: torch.dtype) -> None:
    """Survivors' noise must be the noise that the whole vocabulary's pass gives them."""
    words = torch.tensor([[12, -7], [5, 5]], dtype=torch.int32)
    ids = torch.arange(49_152, dtype=torch.int32)
    whole = gumbel(hash_tokens(ids, words), dtype)
    some = torch.randperm(49_152)[:777].sort().values
    assert torch.equal(gumbel(hash_row(ids[some], (12, -7)), dtype), whole[0, some])
    assert torch.equal(gumbel(hash_tokens(ids, words[1:]), dtype)[0], whole[1])


def test_the_extremes_are_finite() -> None:
    """Hash 0 and hash 2**32 - 1 exist; an infinite or NaN noise would emit a token for sure."""
    bits = torch.tensor([0, -1, 1, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
    for dtype in (torch.float32, torch.float64):
        g = gumbel(bits, dtype)
        assert torch.isfinite(g).all()
        assert float(g[0]) == pytest.approx(22.87, abs=0.01)
        assert float(g[0]) > float(g[2]) > float(g[4]) >= float(g[5]) > float(g[3]) >= float(g[1])


@pytest.mark.parametrize("what", ["token", "position", "seed"])
def test_every_input_bit_moves_every_output_bit(what: str) -> None:
    """Avalanche: neighbours in any input must have unrelated noise."""
    n = 8000
    gen = torch.Generator().manual_seed(5)
    seeds = [int(x) for x in torch.randint(0, 1 << 31, (n,), generator=gen)]
    keys = torch.tensor([noise_key(s, 0) for s in seeds])
    positions = torch.randint(0, 1 << 17, (n,), generator=gen)
    tokens = torch.randint(0, 1 << 17, (n,), generator=gen)
    base = _bits(keys, positions, tokens)
    worst = 0.0
    for bit in range(17):
        if what == "token":
            other = _bits(keys, positions, tokens ^ (1 << bit))
        elif what == "position":
            other = _bits(keys, positions ^ (1 << bit), tokens)
        else:
            flipped = torch.tensor([noise_key(s ^ (1 << bit), 0) for s in seeds])
            other = _bits(flipped, positions, tokens)
        flips = (((base ^ other).unsqueeze(1) >> torch.arange(32)) & 1).to(torch.float64).mean(0)
        worst = max(worst, float((flips - 0.5).abs().max()))
    assert worst < 0.03  # 5.4 standard deviations over 544 shares


def _bits(keys: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    words = noise_words_of(keys, positions)
    return hash_tokens(tokens.to(torch.int32).unsqueeze(1), words)[:, 0].to(torch.int64)


def _pairs(name: str, n: int) -> tuple[Tensor, Tensor]:
    near = torch.arange(n)
    key = torch.full((n,), noise_key(11, 0))
    zero = torch.zeros(n, dtype=torch.int64)
    several = torch.tensor([noise_key(s, 0) for s in range(n)])
    made: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "positions": lambda: (uniforms(key, near, zero + 5), uniforms(key, near + 1, zero + 5)),
        "tokens": lambda: (uniforms(key, zero + 9, near), uniforms(key, zero + 9, near + 1)),
        "seeds": lambda: (
            uniforms(several[:-1], zero[1:], zero[1:]),
            uniforms(several[1:], zero[1:], zero[1:]),
        ),
        "samples": lambda: (
            uniforms(several, zero, zero + 3),
            uniforms(torch.tensor([noise_key(s, 1) for s in range(n)]), zero, zero + 3),
        ),
        "seeds of one position, all tokens": lambda: (
            uniforms(key, zero + 40, near),
            uniforms(torch.full((n,), noise_key(12, 0)), zero + 40, near),
        ),
        "positions of one seed, all tokens": lambda: (
            uniforms(key, zero + 40, near),
            uniforms(key, zero + 41, near),
        ),
    }
    return made[name]()


@pytest.mark.parametrize(
    "name",
    [
        "positions",
        "tokens",
        "seeds",
        "samples",
        "seeds of one position, all tokens",
        "positions of one seed, all tokens",
    ],
)
def test_noise_is_uniform_and_neighbours_are_independent(name: str) -> None:
    """Correlated noise would repeat a choice; a skewed one would bias it."""
    n = 40_000
    a, b = _pairs(name, n)
    cells = torch.bincount((a * 256).long(), minlength=256)
    assert abs(chi2(cells, len(a) / 256)) < 5
    joint = torch.bincount((a * 16).long() * 16 + (b * 16).long(), minlength=256)
    assert abs(chi2(joint, len(a) / 256)) < 5
    corr = float(torch.corrcoef(torch.stack([a, b]))[0, 1])
    assert abs(corr) < 4.5 / math.sqrt(len(a))


def test_two_positions_share_no_permuted_noise() -> None:
    """Two positions whose first words are close must not hold one another's numbers.

    They would under token ids exchanged by XOR, if the second word did not part them.
    """
    ids = torch.arange(4096, dtype=torch.int32)
    here = set(hash_row(ids, (1000, 77)).tolist())
    assert here == set(hash_row(ids, (1000 ^ 5, 77)).tolist()), "the case that must not occur"
    assert len(here & set(hash_row(ids, (1000 ^ 5, 78)).tolist())) < 5


def test_the_tail_of_a_large_vocabulary_exists() -> None:
    """Uniforms of 24 bits end at g = 16.6; beyond lie the rare tokens of a large vocabulary."""
    key = noise_key(2024, 0)
    ids = torch.arange(BIG, dtype=torch.int32)
    beyond, rows = 0, 1500
    for position in range(rows):
        bits = hash_row(ids, noise_words(key, position))
        # g > 16.636 exactly where the unsigned hash is below 2**8.
        low = bits[(bits >= 0) & (bits < 256)]
        beyond += len(low)
        if len(low):
            assert float(gumbel(low, torch.float32).min()) > 16.63
    expected = rows * BIG * 2.0**-24  # 13.6
    assert abs(beyond - expected) < 5 * math.sqrt(expected)
