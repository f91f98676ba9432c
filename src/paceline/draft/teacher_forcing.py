"""Drafter networks over a whole text at once: what each place would draft, if all before it was right.

Three `Attend`s of dense attention in place of a paged cache, and the target's tapped streams. For checking
a drafter on a few hundred tokens (`selftest.py`); serving and training have their own.

Letters: T tokens of a text, n blocks, b rows of a block, Hq/Hkv heads, D head size, Ht target hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.batch import AttnSite, ForwardBatch, ForwardMode

if TYPE_CHECKING:
    from paceline.draft.base import DraftNet

_NEG_INF = float("-inf")


class TextAttend:
    """Causal attention of one text to itself."""

    def heads(self, site: AttnSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
        place = torch.arange(q.shape[0], device=q.device)
        sees = place <= place[:, None]
        if site.window is not None:
            sees &= place[:, None] - place < site.window
        keys, values = _repeated(k, q), _repeated(v, q)
        scores = torch.einsum("ihd,jhd->hij", _wide(q), keys) * site.scale
        weights = scores.masked_fill(~sees, _NEG_INF).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, values).to(q.dtype)


@dataclass(frozen=True, slots=True)
class BlocksAttend:
    """Attention of n independent blocks to one text's context before each, and to themselves."""

    context: Sequence[tuple[Tensor, Tensor]]  # per layer: keys, values [T, Hkv, D]
    starts: Tensor  # [n] int64 position of each block's first row
    block: int
    causal: bool | None = None  # in place of what the sites say

    def heads(self, site: AttnSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n * b, Hq, D], k and v [n * b, Hkv, D] -> [n * b, Hq, D]."""
        size, (known, values) = self.block, self.context[site.index]
        num, total = self.starts.shape[0], known.shape[0]
        text = torch.arange(total, device=q.device)
        own = self.starts[:, None] + torch.arange(size, device=q.device)  # [n, b]
        far = (text < self.starts[:, None])[:, None].expand(-1, size, -1)
        row = torch.arange(size, device=q.device)
        causal = site.tail == "causal" if self.causal is None else self.causal
        near = row <= row[:, None] if causal else torch.ones_like(row[:, None] == row)
        if site.window is not None:
            far = far & (own[:, :, None] - text < site.window)
            near = near & (row[:, None] - row < site.window)
        sees = torch.cat((far, near.expand(num, -1, -1)), dim=2)[:, None]  # [n, 1, b, T + b]
        packed = _wide(q).view(num, size, *q.shape[1:])
        mine = _repeated(k, q).view(packed.shape)
        scores = torch.cat(
            (
                torch.einsum("nihd,jhd->nhij", packed, _repeated(known, q)),
                torch.einsum("nihd,njhd->nhij", packed, mine),
            ),
            dim=3,
        )
        weights = (scores * site.scale).masked_fill(~sees, _NEG_INF).softmax(-1)
        out = torch.einsum("nhij,jhd->nihd", weights[..., :total], _repeated(values, q))
        mine = _repeated(v, q).view(packed.shape)
        out = out + torch.einsum("nhij,njhd->nihd", weights[..., total:], mine)
        return out.reshape(q.shape).to(q.dtype)


@dataclass(slots=True)
class ChainsAttend:
    """Attention of a network that is fed by itself, one chain from every place of a text.

    The first pass is causal over the text. In a later one entry i sees the first pass's entries up to its
    own and entry i of every pass since.
    """

    passes: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def heads(self, site: AttnSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
        self.passes.append((_repeated(k, q), _repeated(v, q)))
        (first, values), later = self.passes[0], self.passes[1:]
        mine = _wide(q)
        far = torch.einsum("ihd,jhd->hij", mine, first)
        future = torch.ones(far.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        near = [(mine * keys).sum(-1).T[:, :, None] for keys, _ in later]
        scores = torch.cat((far.masked_fill(future, _NEG_INF), *near), dim=2)
        weights = (scores * site.scale).softmax(-1)
        out = torch.einsum("hij,jhd->ihd", weights[:, :, : len(first)], values)
        for i, (_, value) in enumerate(later):
            out = out + weights[:, :, len(first) + i].T[:, :, None] * value
        return out.to(q.dtype)


def text_pass(token_ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> ForwardBatch:
    """A pass over flat tokens [T] int64 of one row, without a cache: pages and slots are not used."""
    count, zero = token_ids.shape[0], torch.zeros_like(token_ids[:1])
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        num_rows=1,
        q_len=count,
        rows=zero,
        token_ids=token_ids,
        positions=positions,
        slots=torch.full_like(token_ids, -1),
        prefix_lens=zero,
        cu_q=torch.cat((zero, zero + count)),
        tail_lens=zero + count,
        mask=mask,
        pages=zero.view(1, 1).to(torch.int32),
    )


@torch.inference_mode()
def streams(target: DraftNet, token_ids: Tensor, layers: Sequence[int]) -> Mapping[int, Tensor]:
    """The target's residual streams [T, Ht] after some of its layers, for a text [T] int64."""
    taps = tuple(sorted(set(layers)))
    batch = text_pass(token_ids, torch.arange(len(token_ids), device=token_ids.device))
    aux = target(batch, TextAttend(), taps).aux
    assert aux is not None, "the target was tapped"
    return dict(zip(taps, aux.chunk(len(taps), dim=-1), strict=True))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values for each query head, in a wide type."""
    return _wide(x).repeat_interleave(q.shape[1] // x.shape[1], dim=1)
