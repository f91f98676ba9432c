"""Prompts through FlashAttention: layout, lengths and windows, against the reference.

The library's operator exists on a GPU alone (tests/gpu/test_attention.py runs it there). Here its contract
stands in for it, in plain PyTorch: rows by offsets, used keys of a padded row, causality aligned to the end.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.attention import flash
from paceline.attention.base import PagedAttend
from paceline.kv.layout import Heads
from tests.oracle import attention as oracle


def by_contract(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int | None,
    window_size_right: int | None,
    seqused_k: Tensor,
) -> tuple[Tensor]:
    """What the operator computes; where no row's query lies, and in keys that are not used, anything."""
    assert (is_causal, dropout_p, return_debug_mask) == (True, 0.0, False)
    assert cum_seq_q.dtype == cum_seq_k.dtype == seqused_k.dtype == torch.int32
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert query.dtype == key.dtype == value.dtype
    out = torch.full_like(query, math.nan)
    group = query.shape[1] // key.shape[1]
    for b, used in enumerate(seqused_k.tolist()):
        first, stop = cum_seq_q[b : b + 2].tolist()
        start = int(cum_seq_k[b])
        assert stop - first <= max_q
        assert used <= max_k == int(cum_seq_k[b + 1]) - start
        k, v = (x[start : start + used].repeat_interleave(group, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[first:stop], k) * scale
        last = torch.arange(stop - first)[:, None] + used - (stop - first)  # the query's own key
        at = torch.arange(used)[None]
        sees = at <= last
        if window_size_left is not None:
            assert window_size_right == 0
            sees = sees & (at >= last - window_size_left)
        weights = scores.masked_fill(~sees, -math.inf).softmax(-1)
        out[first:stop] = torch.einsum("hqk,khd->qhd", weights, v)
    return (out,)


def places_are_positions(made: oracle.Scene) -> bool:
    """As in every pass of the engine's; a scene has keys between the prefix and the queries."""
    return not any(row.earlier for row in made.rows)


@pytest.mark.parametrize("rows_at_once", [1, 99])
@pytest.mark.parametrize("scene", list(oracle.EXTEND_SCENES))
def test_prompts_are_the_definition(
    scene: str, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every scene and site, rows together or one by one; dead tokens are zeros whatever they hold."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", by_contract, raising=False)
    if rows_at_once == 1:
        monkeypatch.setattr(flash, "_GATHER_BYTES", 1)
    made = oracle.build(scene, layout=Heads(2, 8))
    backend = flash.FlashPrompts()
    for site in oracle.every_site(8):
        if site.window is not None and not places_are_positions(made):
            continue
        want, live = oracle.attend(made, site), int(made.batch.cu_q[-1])
        backend.plan(made.batch)
        found = PagedAttend(backend, made.pool, made.batch).heads(site, made.q, made.k, made.v)
        torch.testing.assert_close(found[:live], want[:live], rtol=1e-9, atol=1e-9)
        assert not found[live:].any()


def test_a_pass_without_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the library."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", None, raising=False)
    made = oracle.build("prompts", layout=Heads(2, 8))
    site = oracle.every_site(8)[0]
    assert flash.FlashPrompts().heads(site, made.q[:0], made.pool, made.batch).shape == (0, 4, 8)
