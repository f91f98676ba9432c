"""The `Attend` of EAGLE-3's training-time test: many chains over the context of packed rows.

Training-time test (EAGLE-3, arXiv 2503.01840, section 3.1) drafts in training as in serving: a chain
begins with the entry at place p, whose feature is the target's, and each later step takes its feature
from the step before. What step k of the chain sees is what it would see in a cache:

    the entries at places 0 ... p of its sequence, made of the target's features
    the entries of its own chain, steps 1 ... k

All chains have all of that in common but for their own k entries, so keys of the context are computed
once and shared, and a mask is never larger than [N, C].

Worked example, one sequence, C = 5. A cross says that the query sees the key; c: context, by place.

                       c0 c1 c2 c3 c4   step 1  step 2
    chain at 1, step 0  x  x  .  .  .      .       .
    chain at 1, step 1  x  x  .  .  .      x       .
    chain at 1, step 2  x  x  .  .  .      x       x

Letters: S rows, C tokens of a row, N chains of a row, k step, Hq/Hkv heads, g = Hq / Hkv, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.batch import AttnSite
from paceline.ops.reference.fused import wide


class Chains:
    """Attention of all chains of packed rows, step after step; for one pass.

    Each call of `heads` is the next step, and remembers its keys and values for those that follow.
    Step 0's own are those of the context at the chain's place already.

    Args:
        context: keys and values [S * C, Hkv, D] of all places.
        docs: [S, C] int32 number of the place's sequence.
        places: [S, N] int64, where chains begin.
    """

    def __init__(self, context: tuple[Tensor, Tensor], docs: Tensor, places: Tensor) -> None:
        self._context = context
        self._docs, self._places = docs, places
        self._own: list[tuple[Tensor, Tensor]] = []
        self._step = 0

    def heads(self, site: AttnSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [S * N, Hq, D], k and v [S * N, Hkv, D] -> [S * N, Hq, D]."""
        assert site.window is None, "EAGLE-3 drafters have no window"
        rows, size = self._docs.shape
        num, kv_heads, dim = self._places.shape[1], *k.shape[1:]
        group = q.shape[1] // kv_heads
        if self._step:
            self._own.append((k, v))
        keys, values = (x.view(rows, size, kv_heads, dim).transpose(1, 2) for x in self._context)

        q = (q * site.scale).view(rows, num, kv_heads, group, dim)
        packed = q.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)  # [S, Hkv, g * N, D]
        far = packed @ keys.transpose(2, 3)
        far = far.view(rows, kv_heads, group, num, size)
        far = far.masked_fill(~self._sees()[:, None, None], -torch.inf)
        peak = far.detach().amax(-1, keepdim=True)
        near = [
            (q * own.view(rows, num, kv_heads, 1, dim)).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1)
            for own, _ in self._own
        ]
        for score in near:
            peak = torch.maximum(peak, score.detach())

        # One softmax over both kinds of keys. They stay apart, so the product with the context is
        # one of aligned sizes and nothing is copied to stand beside something else.
        precise = wide(q.dtype)
        far = (far.to(precise) - peak.to(precise)).exp()
        mass = far.sum(-1, keepdim=True)
        weights = far.to(q.dtype).view(rows, kv_heads, -1, size)
        out = (weights @ values).view(rows, kv_heads, group, num, dim).to(precise)
        for score, (_, own) in zip(near, self._own, strict=True):
            weight = (score.to(precise) - peak.to(precise)).exp()
            mass = mass + weight
            value = own.view(rows, num, kv_heads, 1, dim).permute(0, 2, 3, 1, 4)
            out = out + weight * value.to(precise)
        out = (out / mass).to(q.dtype)
        self._step += 1
        return out.permute(0, 3, 1, 2, 4).reshape(-1, kv_heads * group, dim)

    def _sees(self) -> Tensor:
        """[S, N, C] bool: same sequence, up to the chain's place."""
        place = torch.arange(self._docs.shape[1], device=self._docs.device)
        own = self._docs.gather(1, self._places)
        sees = self._docs[:, None, :] == own[:, :, None]
        return sees & (place <= self._places[:, :, None])
