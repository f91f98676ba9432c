"""What sampling options do to logits: plain torch on any device, one row per line, the definition.

Every function treats each row by itself with a method that does not depend on how many rows there
are: element-wise maths, maxima, sorted *values*, whole-number sums, and sums in a fixed order. So a
row's bits are the same alone and in company, and ties are cut the same way everywhere: value
descending, then token id ascending. (`torch.topk` and `torch.sort` give equal values in any order of
ids; here only their values are used.)

Letters: m rows, V vocabulary, A path length, K bias pairs or top log-probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")
_FIXED = 2.0**40  # mass of the likeliest token; V of them stay far below 2**63


def unpack_bits(words: Tensor, size: int) -> Tensor:
    """[m, ceil(size / 32)] int32, lowest bit first -> [m, size] bool."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> bits) & 1).flatten(1)[:, :size].to(torch.bool)


def ban(logits: Tensor, token_ids: Tensor, rows: Tensor) -> Tensor:
    """Ban tokens in some rows, except where that would leave nothing to emit.

    Args:
        logits: [m, V].
        token_ids: [m, K] int64; ids outside 0 ... V-1 are ignored.
        rows: [m] bool, the rows that are touched.
    """
    size = logits.shape[1]
    use = rows.unsqueeze(1) & (token_ids >= 0) & (token_ids < size)
    banned = torch.zeros(logits.shape[0], size + 1, dtype=torch.bool, device=logits.device)
    banned.scatter_(1, torch.where(use, token_ids, size), value=True)
    return _unless_nothing(logits, banned[:, :size])


def ban_bits(logits: Tensor, words: Tensor, rows: Tensor) -> Tensor:
    """`ban` for tokens named by bits.

    Args:
        logits: [m, V].
        words: [m, ceil(V / 32)] int32, lowest bit first.
        rows: [m] bool, the rows that are touched.
    """
    return _unless_nothing(logits, unpack_bits(words, logits.shape[1]) & rows.unsqueeze(1))


def _unless_nothing(logits: Tensor, banned: Tensor) -> Tensor:
    cut = logits.masked_fill(banned, NEG_INF)
    return torch.where((cut.amax(1, keepdim=True) > NEG_INF), cut, logits)


def add_bias(logits: Tensor, token_ids: Tensor, values: Tensor) -> Tensor:
    """Add values [m, K] to logits [m, V] at token_ids, both [m, K]; padding adds 0 to token 0."""
    return logits.scatter_add(1, token_ids, values.to(logits.dtype))


def penalize(
    logits: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
    path_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Apply repetition (CTRL, arXiv 1909.05858), then frequency, then presence penalties.

    Repetition divides positive and multiplies other logits of tokens seen in prompt or output; the
    other two subtract frequency * count and presence * (count > 0), counted over the output. Neutral
    values (1, 0, 0) change no bit.

    Args:
        logits: [m, V].
        counts: [m, V] int32 tokens emitted, the root included; overwritten.
        in_prompt: [m, V] bool.
        path_tokens: [m, A] int64 tokens below the root on the node's own path, -1 padded.
        repetition: [m] float64.
        presence: [m] float64.
        frequency: [m] float64.
    """
    if path_tokens.shape[1]:
        real = path_tokens >= 0
        counts.scatter_add_(1, path_tokens.clamp(min=0), real.to(counts.dtype))
    kind = logits.dtype
    emitted = counts > 0
    rep = repetition.to(kind).unsqueeze(1)
    scaled = torch.where(logits > 0, logits / rep, logits * rep)
    logits = torch.where(emitted | in_prompt, scaled, logits)
    logits = logits - counts.to(kind) * frequency.to(kind).unsqueeze(1)
    return logits - emitted.to(kind) * presence.to(kind).unsqueeze(1)


def keep_min_p(logits: Tensor, log_min_p: Tensor) -> Tensor:
    """Keep tokens at least min_p as likely as the likeliest: logits [m, V], log_min_p [m]."""
    gap = logits - logits.amax(1, keepdim=True)
    return logits.masked_fill(~(gap >= log_min_p.to(logits.dtype).unsqueeze(1)), NEG_INF)


def keep_best(logits: Tensor, descending: Tensor, count: Tensor) -> Tensor:
    """Keep each row's `count` best tokens: value descending, then id ascending.

    Args:
        logits: [m, V].
        descending: [m, V] the same values, sorted.
        count: [m] int64, 1 ... V.
    """
    border = descending.gather(1, (count - 1).unsqueeze(1))
    above = logits > border
    room = count - above.sum(1)
    ties = logits == border
    keep = above | (ties & (ties.cumsum(1) <= room.unsqueeze(1)))
    return logits.masked_fill(~keep, NEG_INF)


def mass(logits: Tensor, best: Tensor) -> Tensor:
    """Unnormalised probability as a whole number: floor(2**40 * exp(logits - best)), int64.

    Sums of whole numbers are exact and do not depend on their order, hence neither on the shape of
    the batch nor on the device's way to reduce. A token below 2**-40 of the likeliest weighs 0.

    Args:
        logits: [m, n].
        best: [m, 1] each row's largest logit.
    """
    return ((logits - best).exp() * _FIXED).to(torch.int64)


def nucleus_size(descending: Tensor, top_p: Tensor) -> Tensor:
    """How many of the best tokens make up the nucleus (Holtzman et al., arXiv 1904.09751).

    A token belongs to it while the mass before it is below top_p of the total.

    Args:
        descending: [m, V] sorted logits, -inf where filtered out.
        top_p: [m] float64.

    Returns:
        [m] int64, at least 1; V where top_p is 1.
    """
    weights = mass(descending, descending[:, :1])
    upto = weights.cumsum(1)
    enough = top_p.unsqueeze(1) * upto[:, -1:].to(torch.float64)
    size = ((upto - weights).to(torch.float64) < enough).sum(1).clamp(min=1)
    return torch.where(top_p >= 1, descending.shape[1], size)


def log_probabilities(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Give log softmax of logits [m, V] at token_ids [m, K] -> [m, K]."""
    best = logits.amax(1, keepdim=True)
    total = sum_in_order((logits - best).exp())
    return logits.gather(1, token_ids) - best - total.log().unsqueeze(1)


def best_tokens(logits: Tensor, count: int) -> Tensor:
    """[m, count] int64 ids of the best tokens, value descending, then id ascending."""
    size = logits.shape[1]
    values = torch.topk(logits, count, dim=1).values
    above = logits > values[:, -1:]
    ties = logits == values[:, -1:]
    keep = above | (ties & (ties.cumsum(1) <= (count - above.sum(1)).unsqueeze(1)))
    ids = torch.arange(size, device=logits.device).expand_as(logits)
    # Distinct numbers, so topk is exact here: the kept ids, ascending (V where a NaN kept too few).
    ids = torch.where(keep, ids, size).topk(count, dim=1, largest=False).values
    ids = ids.clamp(max=size - 1)
    order = torch.sort(logits.gather(1, ids), dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)


def sum_in_order(x: Tensor) -> Tensor:
    """Sum each row of x [m, n] by halving: the same additions whatever m or the device -> [m]."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        paired = x[:, :half] + x[:, half : 2 * half]
        if x.shape[1] % 2:
            paired[:, 0] += x[:, -1]
        x = paired
    return x[:, 0]
