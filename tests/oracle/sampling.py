"""The rules of sampling once more, slowly: one row, one token, Python numbers only.

Written from the rules (architecture page, "Verifier"), not from the code: noise, processing and the
argmax. Used wherever a token has to be explained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.request import SamplingParams

_M32, _M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
NEG_INF = float("-inf")


def _finish(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 % 2**64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def key(seed: int, sample_index: int) -> int:
    """The noise key of a sample, unsigned."""
    return _finish(_finish(seed % 2**64) ^ (0xD1342543DE82EF95 * (sample_index + 1) % 2**64))


def bits(noise_key: int, position: int, token: int) -> int:
    """The 32 bits of one (key, position, token), unsigned."""
    both = _finish((noise_key + 0x9E3779B97F4A7C15 * position) % 2**64)
    x = token ^ (both & _M32)
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x ^= both >> 32
    x = x * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def gumbel(noise_key: int, position: int, token: int) -> float:
    """Gumbel noise in double precision."""
    v = (bits(noise_key, position, token) + 0.5) * 2.0**-32
    return -math.log(-math.log1p(-v))


def process(
    logits: Sequence[float],
    params: SamplingParams,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int] = (),
    grammar: set[int] | None = None,
) -> list[float]:
    """Logits after every option, -inf where a token cannot be emitted.

    `output` is everything emitted before this token, the draft path included.
    """
    size = len(logits)
    z = [float(x) for x in logits]
    only = params.allowed_token_ids
    for t in range(size):
        if (only is not None and t not in only) or t in params.banned_token_ids:
            z[t] = NEG_INF
        if grammar is not None and t not in grammar:
            z[t] = NEG_INF
    if len(output) < params.min_tokens:
        cut = [NEG_INF if t in stop_ids else z[t] for t in range(size)]
        if max(cut) > NEG_INF:
            z = cut
    for t, bias in params.logit_bias.items():
        z[t] += bias
    for t in range(size):
        count = output.count(t)
        if count or t in prompt:
            rep = params.repetition_penalty
            z[t] = z[t] / rep if z[t] > 0 else z[t] * rep
        z[t] -= params.frequency_penalty * count
        z[t] -= params.presence_penalty * (count > 0)
    if params.temperature == 0:
        return z
    z = [x / params.temperature for x in z]
    best = max(z)
    if params.min_p > 0:
        z = [x if x - best >= math.log(params.min_p) else NEG_INF for x in z]
    order = sorted(range(size), key=lambda t: (-z[t], t))
    if params.top_k > 0:
        for t in order[params.top_k :]:
            z[t] = NEG_INF
    if params.top_p < 1:
        weights = [math.floor(2**40 * math.exp(z[t] - best)) for t in order]
        total, before = sum(weights), 0
        for rank, t in enumerate(order):
            if rank > 0 and not before < params.top_p * total:
                z[t] = NEG_INF
            before += weights[rank]
    return z


def token(processed: Sequence[float], temperature: float, noise_key: int, position: int) -> int:
    """The lowest id of the largest processed logit plus noise."""
    scores = list(processed)
    if temperature > 0:
        scores = [
            z if z == NEG_INF else z + gumbel(noise_key, position, t)
            for t, z in enumerate(processed)
        ]
    return scores.index(max(scores))


def words(allowed: Sequence[set[int]], vocab: int) -> Tensor:
    """Sets of tokens as a grammar gives them: [m, ceil(vocab / 32)] int32, lowest bit first."""
    out = []
    for tokens in allowed:
        mask = sum(1 << t for t in tokens)
        parts = [(mask >> (32 * w)) & _M32 for w in range(-(-vocab // 32))]
        out.append([w - (1 << 32) if w >> 31 else w for w in parts])
    return torch.tensor(out, dtype=torch.int32)
