"""Attention as ten lines of dense softmax, and a pass over one whole text: what models need to run.

And a target as a drafter sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline import models
from paceline.core.batch import AttnSite, ForwardBatch, ForwardMode
from paceline.draft.base import TargetInfo
from paceline.models import CausalLM


class DenseAttend:
    """Causal attention over one row, nothing cached."""

    def heads(self, site: AttnSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * site.scale
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, v)


def whole(token_ids: Sequence[int], device: torch.device | str = "cpu") -> ForwardBatch:
    """One row, all of its tokens as queries, nothing cached before."""
    count = len(token_ids)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        num_rows=1,
        q_len=count,
        rows=zero,
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.arange(count, device=device),
        slots=torch.full((count,), -1, device=device),
        prefix_lens=zero,
        cu_q=torch.tensor([0, count], device=device),
        tail_lens=torch.tensor([count], device=device),
        mask=None,
        pages=torch.zeros(1, 1, dtype=torch.int32, device=device),
    )


@torch.inference_mode()
def logits(net: CausalLM, token_ids: Sequence[int]) -> Tensor:
    """Logits [T, V] of a text."""
    return net.head(net(whole(token_ids, net.device), DenseAttend()).hidden)


def greedy(net: CausalLM, token_ids: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens at temperature 0."""
    text = list(token_ids)
    for _ in range(count):
        text.append(int(logits(net, text)[-1].argmax()))
    return text[len(token_ids) :]


def target_of(folder: Path, dtype: torch.dtype = torch.float64) -> tuple[CausalLM, TargetInfo]:
    """A target and what it lends a drafter."""
    cpu = torch.device("cpu")
    loaded = models.load(models.resolve(str(folder)), device=cpu, dtype=dtype, weights="bf16")
    info = TargetInfo(
        config=loaded.config, device=cpu, dtype=dtype, embed=loaded.net.embed, head=loaded.net.head
    )
    return loaded.net, info


def features_of(net: CausalLM, tokens: Sequence[int], taps: tuple[int, ...]) -> Tensor:
    """Tapped features [T, F] of a fresh pass over a whole text."""
    found = net(whole(tokens), DenseAttend(), taps).aux
    assert found is not None
    return found.detach()
