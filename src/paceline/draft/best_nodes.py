"""The best nodes of a proposal that is lists; what is tensors is `ops/reference/growth.py`."""

from __future__ import annotations

from paceline.core.tree import Proposal


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
