"""Gumbel noise keyed by (seed, sample index, position, token id): counter-based, no state.

The target's token is the argmax of processed logits plus this noise (the Gumbel-max trick), so what
is emitted at a position depends on nothing but the logits and these four numbers: not on the batch,
the tree or the drafter (drafter-invariant decoding, arXiv 2408.07978). A drafter that samples uses
the same noise, which makes its proposals likely to match.

    key   = mix64(mix64(seed) ^ odd * (sample index + 1))            once per request, on the host
    words = mix64(key + golden * position), cut in two 32-bit words  once per node
    x     = mix32(token ^ words[0]), words[1] entering between the two multiplications
    v     = (x + 1/2) * 2**-32, kept below 1
    g     = -log(-log1p(-v))

mix64 is splitmix64's finaliser (Steele, Lea, Flood 2014); mix32 has the two multiplications of
Wellons' lowbias32. The second word makes two positions share no permuted copy of one another's
noise, which one 32-bit word would (at a chance of V / 2**32 a pair). log1p keeps v near 0 exact:
that is where large g come from, and a uniform of 24 bits would lose the tail of a large vocabulary.

Not here: when noise is used, and for which tokens (`sampler`, `rowwise`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_U64 = (1 << 64) - 1
_U32 = (1 << 32) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ODD = 0xD1342543DE82EF95
_MUL_A = 0xBF58476D1CE4E5B9
_MUL_B = 0x94D049BB133111EB
_MUL_C = 0x7FEB352D
_MUL_D = 0x846CA68B


def noise_key(seed: int, sample_index: int) -> int:
    """Key of one sample of one request: a signed 64-bit whole number.

    Args:
        seed: any whole number; taken modulo 2**64.
        sample_index: which of the n samples of one prompt, from 0.
    """
    inner = _mix64(seed & _U64)
    return _signed(_mix64(inner ^ (_ODD * (sample_index + 1) & _U64)), 64)


def noise_words(key: int, position: int) -> tuple[int, int]:
    """The two words (signed 32 bits) under which every token of a position is hashed.

    Args:
        key: from `noise_key`.
        position: absolute position of the token to be emitted.
    """
    mixed = _mix64((key + _GOLDEN * position) & _U64)
    return _signed(mixed & _U32, 32), _signed(mixed >> 32, 32)


def noise_words_of(keys: Tensor, positions: Tensor) -> Tensor:
    """`noise_words` on the device: keys [M] int64, positions [M] int64 -> [M, 2] int32."""
    x = keys + positions * _signed(_GOLDEN, 64)
    x = (x ^ _shift64(x, 30)) * _signed(_MUL_A, 64)
    x = (x ^ _shift64(x, 27)) * _signed(_MUL_B, 64)
    x = x ^ _shift64(x, 31)
    # Cut as signed words: int64 -> int32 keeps the low 32 bits.
    return torch.stack([x.to(torch.int32), (x >> 32).to(torch.int32)], dim=-1)


def hash_tokens(tokens: Tensor, words: Tensor) -> Tensor:
    """32 mixed bits for each token under each pair of words.

    Args:
        tokens: [n] or [m, n] int32 token ids.
        words: [m, 2] int32.

    Returns:
        [m, n] int32; read it as unsigned.
    """
    x = tokens ^ words[:, :1]
    x ^= (x >> 16) & 0xFFFF  # `>>` copies the sign on signed words; the mask makes it logical
    x *= _MUL_C
    x ^= (x >> 15) & 0x1FFFF
    x ^= words[:, 1:]
    x *= _signed(_MUL_D, 32)
    x ^= (x >> 16) & 0xFFFF
    return x


def hash_row(tokens: Tensor, words: tuple[int, int]) -> Tensor:
    """`hash_tokens` for one pair of words on a CPU: [n] int32 -> [n] int32, half the time.

    NumPy's unsigned words need no masks; the integers are the same.
    """
    x = tokens.numpy().view(np.uint32) ^ np.uint32(words[0] & _U32)
    y = x >> np.uint32(16)
    x ^= y
    x *= np.uint32(_MUL_C)
    np.right_shift(x, np.uint32(15), out=y)
    x ^= y
    x ^= np.uint32(words[1] & _U32)
    x *= np.uint32(_MUL_D)
    np.right_shift(x, np.uint32(16), out=y)
    x ^= y
    return torch.from_numpy(x.view(np.int32))


def gumbel(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise from hashed bits.

    Args:
        bits: int32, any shape, read as unsigned.
        dtype: float32, or float64 (whose v carries all 32 bits everywhere).

    Returns:
        Same shape in `dtype`; finite: -2.9 ... 22.9.
    """
    v = bits.view(torch.uint32).to(dtype)
    v.add_(0.5).mul_(2.0**-32)
    v.clamp_(
        max=1 - torch.finfo(dtype).eps / 2
    )  # rounding may reach 1, whose logarithm is infinite
    return v.neg_().log1p_().neg_().log_().neg_()


def keyed_noise(
    rows: Tensor, positions: Tensor, token_ids: Tensor, keys: Tensor, temperature: Tensor
) -> Tensor:
    """Noise of some tokens: what a pick adds to their scores; 0 in greedy rows.

    Args:
        rows: [M] int64.
        positions: [M] int64 of the tokens to be emitted.
        token_ids: [M, n] int64.
        keys: [R+1] int64 noise key of every row.
        temperature: [R+1] of every row.

    Returns:
        [M, n] float32.
    """
    noise = gumbel(
        hash_tokens(token_ids.to(torch.int32), noise_words_of(keys[rows], positions)), torch.float32
    )
    return noise.masked_fill((temperature[rows] == 0).unsqueeze(1), 0.0)


def noise_ahead(
    rows: Tensor, lens: Tensor, token_ids: Tensor, keys: Tensor, temperature: Tensor
) -> Tensor:
    """`keyed_noise` of tokens that may follow each row's newest one.

    Args:
        rows: [B] int64.
        lens: [R+1] int64 position of every row's newest token.
        token_ids: [B, P, C] int64 for the positions lens + 1 ... lens + P.
        keys: [R+1] int64 noise key of every row.
        temperature: [R+1] of every row.

    Returns:
        [B, P, C] float32.
    """
    steps = torch.arange(1, token_ids.shape[1] + 1, device=rows.device)
    places = lens[rows].unsqueeze(1) + steps
    owners = rows.unsqueeze(1).expand_as(places).reshape(-1)
    flat = token_ids.flatten(0, 1)
    return keyed_noise(owners, places.view(-1), flat, keys, temperature).view(token_ids.shape)


def _mix64(x: int) -> int:
    x = (x ^ (x >> 30)) * _MUL_A & _U64
    x = (x ^ (x >> 27)) * _MUL_B & _U64
    return x ^ (x >> 31)


def _signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def _shift64(x: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)
