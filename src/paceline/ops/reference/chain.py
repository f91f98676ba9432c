"""What a chain of first choices is made of, and what was emitted in its place: the definitions.

Letters: B rows, P positions, C candidates, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def chain(roots: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The chain of every position's best candidate behind a root.

    Args:
        roots: [B] int64.
        ids: [B, P, C] int64 candidates, best first.
        weights: [B, P, C] float32 log survivals.

    Returns:
        tokens [B, 1 + P] int64 and scores [B, 1 + P] float32, the sums of the weights so far: 0 at the root.
    """
    tokens = torch.cat((roots.unsqueeze(1), ids[:, :, 0]), dim=1)
    return tokens, pad(weights[:, :, 0].cumsum(1), (1, 0))


def emitted(cu: Tensor, next_ids: Tensor, positions: int) -> Tensor:
    """What each row emitted: [B, P] int64, -1 where it emitted less than P tokens.

    Args:
        cu: [B+1] int64 where the rows' entries begin and end.
        next_ids: [T] int64 the token after each entry.
        positions: P.
    """
    start, stop = cu[:-1].unsqueeze(1), cu[1:].unsqueeze(1)
    at = start + torch.arange(positions, device=cu.device)
    return torch.where(at < stop, next_ids[at.clamp(max=next_ids.shape[0] - 1)], -1)
