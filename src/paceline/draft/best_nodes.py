"""The best of many scored prefixes, as a tree or as lists: what tree drafters have in common.

A drafter that grows a tree level by level looks at more prefixes than it proposes. The proposal is the
best of them; since no prefix scores above the one that it extends, and ties go to the one that was looked
at first, those are closed under parents and already stand in an order in which parents come first.

Letters: B rows, M prefixes (the root's included), N nodes, n longest prefix, W mask words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.tree import NEG_INF, DraftTree, Proposal, num_words

_WORD = 64


def best_of(proposal: Proposal, count: int) -> Proposal:
    """The `count` best nodes by score, lowest index first among equals; closed under parents."""
    total = len(proposal.tokens)
    if total <= count:
        return proposal
    order = sorted(range(total), key=lambda i: (-proposal.scores[i], i))
    kept = sorted(order[:count])
    index = {old: new for new, old in enumerate(kept)}
    index[-1] = -1
    return Proposal(
        tokens=[proposal.tokens[i] for i in kept],
        parents=[index[proposal.parents[i]] for i in kept],
        scores=[proposal.scores[i] for i in kept],
        sources=[proposal.sources[i] for i in kept] if proposal.sources else (),
    )


def best_nodes(
    tokens: Tensor, scores: Tensor, paths: Tensor, count: int, source: int | Tensor
) -> DraftTree:
    """The root and the `count` best prefixes of every row.

    Args:
        tokens: [B, M] int64, the last of each prefix; the root first.
        scores: [B, M] log survivals; 0 at the root, none above what it extends.
        paths: [B, M, n] places, among the M, of each prefix of it, itself last, the root included;
            filled up with M at the front.
        count: nodes besides the root.
        source: which drafter proposes them, or [B, M] int8 which drafter proposes each.

    Returns:
        N = 1 + count nodes, or M if those are fewer. A prefix that cannot survive (-inf) is padding.
    """
    total, longest = paths.shape[1:]
    scores, order = scores.sort(dim=1, descending=True, stable=True)  # the root stays first
    scores, order = scores[:, : count + 1], order[:, : count + 1]
    real = scores > NEG_INF
    # Where each prefix stands in the tree, -1 if nowhere; and one place for what a path lacks.
    nodes = torch.arange(order.shape[1], device=tokens.device).expand_as(order)
    place = order.new_full((order.shape[0], total + 1), -1).scatter_(1, order, nodes)
    paths = paths.gather(1, order.unsqueeze(2).expand(-1, -1, longest))
    paths = place.gather(1, paths.flatten(1)).view_as(paths)
    paths.masked_fill_(~real.unsqueeze(2), -1)
    sources = source if isinstance(source, int) else source.gather(1, order)
    return DraftTree(
        token_ids=tokens.gather(1, order).masked_fill_(~real, -1),
        parents=paths[:, :, -2],
        depths=((paths >= 0).sum(2) - 1).clamp_(min=0),
        mask=_bits(paths),
        scores=scores.to(torch.float32),
        sources=(real & (nodes > 0)).to(torch.int8) * sources,
        num_nodes=real.sum(1),
    )


def _bits(paths: Tensor) -> Tensor:
    """Ancestor masks [B, N, W] from paths [B, N, n] of node numbers, -1 for none."""
    at = paths.clamp(min=0)
    bits = (1 << at % _WORD).masked_fill_(paths < 0, 0)
    words = paths.new_zeros(*paths.shape[:2], num_words(paths.shape[1]))
    return words.scatter_add_(2, at // _WORD, bits)
