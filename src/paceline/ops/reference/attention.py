"""Reference attention over a paged cache: any device, any dtype, every kind of visibility.

It is the definition that faster versions are checked against. Rows are padded to the longest one,
their keys are gathered through the page table, and all rows are computed together in float32
(float64 if q is). Bits may depend on which rows share a pass; nothing else does.

Letters: B rows, T tokens, Q longest query, K longest row of keys, Hq/Hkv heads, g = Hq / Hkv,
D head size, S slots, W mask words.

Worked example: prefix 2, tail of 4 keys of which the last 3 are this pass's queries (root already
in the cache), root -> a, b; a -> c. Row of keys, by place:

    place     0   1 | 2     3  4  5
    key       p0  p1| root  a  b  c
    tail bit        | 0     1  2  3
    c sees    x   x | x     x     x      mask word of c: 0b1011

There is no host sync on an accelerator: sizes come from host values of the batch and from shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.batch import AttnSite, ForwardBatch
from paceline.ops.reference.kv import slots_of

SCORE_BYTES = 256 << 20  # most bytes of scores, or of gathered keys, that exist at once
_WORD = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedView:
    """Where the queries and keys of a pass are, row by row. The same for all layers."""

    query_at: Tensor  # [B, Q] flat index of each query (any live index where there is none)
    back: Tensor  # [T] index of each flat token into B * Q
    dead: Tensor  # [T] bool: no row's query
    query_pos: Tensor  # [B, Q] positions
    first_query: Tensor  # [B, 1] tail index of the row's first query
    prefix_lens: Tensor  # [B, 1]
    tail_lens: Tensor  # [B, 1]
    slots: Tensor  # [B, K] slot of each key
    key_pos: Tensor  # [B, K] positions; of tail keys before the first query, their place
    mask: Tensor | None  # [T, W], the batch's


def padded_view(batch: ForwardBatch, page_size: int) -> PaddedView:
    """Lay a pass out as padded rows.

    Args:
        batch: the pass; its real rows are the first `num_rows`, none with over `q_len` queries.
        page_size: tokens per page of the pool.
    """
    rows = slice(batch.num_rows)
    prefix, tail = batch.prefix_lens[rows, None], batch.tail_lens[rows, None]
    start, stop = batch.cu_q[: batch.num_rows, None], batch.cu_q[1 : batch.num_rows + 1, None]
    dev, tokens = batch.positions.device, batch.positions.shape[0]
    num_keys = _num_keys(batch, page_size)
    flat = torch.arange(tokens, device=dev)
    row = torch.searchsorted(stop.squeeze(1).contiguous(), flat, right=True)
    dead = row >= batch.num_rows
    row = row.clamp_(max=batch.num_rows - 1)
    query_at = (start + torch.arange(batch.q_len, device=dev)).clamp_(max=tokens - 1)
    place = torch.arange(num_keys, device=dev)[None]
    first_query = tail - (stop - start)
    ahead = place - prefix - first_query  # the how-manieth query of its row a key is
    own_pos = batch.positions[(start + ahead).clamp_(0, tokens - 1)]
    return PaddedView(
        query_at=query_at,
        back=torch.where(dead, 0, row * batch.q_len + flat - start.squeeze(1)[row]),
        dead=dead,
        query_pos=batch.positions[query_at],
        first_query=first_query,
        prefix_lens=prefix,
        tail_lens=tail,
        slots=slots_of(
            batch.pages, torch.arange(batch.num_rows, device=dev)[:, None], place, page_size
        ),
        key_pos=torch.where(ahead >= 0, own_pos, place),
        mask=batch.mask,
    )


def _num_keys(batch: ForwardBatch, page_size: int) -> int:
    """Keys of the longest row; where reading that would stall, what the page table can hold."""
    if batch.positions.device.type != "cpu":
        return batch.pages.shape[1] * page_size
    tails = batch.tail_lens[: batch.num_rows]
    num_keys = int((batch.prefix_lens[: batch.num_rows] + tails).max())
    assert int(batch.cu_q[: batch.num_rows + 1].diff().max()) <= batch.q_len, (
        "a row has more queries than q_len"
    )
    words = num_keys if batch.mask is None else batch.mask.shape[1] * _WORD
    assert int(tails.max()) <= words, "the tail is longer than the mask has bits"
    return num_keys


def visible(view: PaddedView, site: AttnSite, rows: slice, queries: slice) -> Tensor:
    """Which keys the queries of some rows see: [b, q, K] bool.

    A query sees the whole prefix; of the tail, what its mask bits say, or without a mask the keys
    up to itself. `site.tail` "causal" also hides later positions; the window hides keys that are
    `window` or more positions back. Both compare positions, not places. A tail key before the
    row's first query has no position in the batch: it counts as earlier than every query, and
    for the window its place stands in for it.
    """
    query_pos = view.query_pos[rows, queries, None]
    key_pos = view.key_pos[rows, None]
    prefix, tail = view.prefix_lens[rows], view.tail_lens[rows]
    bit = torch.arange(view.slots.shape[1], device=view.slots.device)[None] - prefix  # [b, K]
    if view.mask is None:
        own_bit = view.first_query[rows] + torch.arange(
            queries.start, queries.stop, device=bit.device
        )
        sees = bit[:, None] <= own_bit[:, :, None]
    else:
        words = view.mask[view.query_at[rows, queries]]  # [b, q, W]
        bits = (words[..., None] >> torch.arange(_WORD, device=bit.device)) & 1
        bits = bits.flatten(2).to(torch.bool)
        at = bit.clamp(0, bits.shape[2] - 1)[:, None].expand(-1, bits.shape[1], -1)
        sees = bits.gather(2, at)
    if site.tail == "causal":
        sees = sees & ((key_pos <= query_pos) | (bit < view.first_query[rows])[:, None])
    sees = (sees & (bit < tail)[:, None]) | (bit < 0)[:, None]
    if site.window is not None:
        sees = sees & (key_pos > query_pos - site.window)
    return sees


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    view: PaddedView,
    site: AttnSite,
    max_bytes: int = SCORE_BYTES,
) -> Tensor:
    """Softmax attention of flat queries over the pages of their rows.

    A key that a query does not see has no effect on it, whatever is stored there: hidden scores
    are replaced, and values that are not finite are taken out of the product. A query that *does*
    see such a value gets NaN.

    Args:
        q: [T, Hq, D]; query head h reads key/value head h // g.
        k_cache: [Hkv, S, D] of one layer.
        v_cache: [Hkv, S, D].
        view: the pass, from `padded_view`.
        site: scale, window, tail rule.
        max_bytes: rows and queries are split into parts with no more scores than this.

    Returns:
        [T, Hq, D] in q's dtype; zeros for dead tokens and for a query that sees nothing.
    """
    num_rows, q_len = view.query_at.shape
    num_keys = view.slots.shape[1]
    heads, dim = q.shape[1:]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores_of_query = num_keys * heads * wide.itemsize
    keys_of_row = 2 * num_keys * k_cache.shape[0] * dim * wide.itemsize
    b_step = min(num_rows, max(1, max_bytes // max(scores_of_query, keys_of_row)))
    q_step = min(q_len, max(1, max_bytes // (b_step * scores_of_query)))
    out = q.new_zeros(num_rows, q_len, heads, dim)
    for b in range(0, num_rows, b_step):
        rows = slice(b, min(b + b_step, num_rows))
        k = k_cache[:, view.slots[rows]].to(wide)  # [Hkv, b, K, D]
        v = v_cache[:, view.slots[rows]].to(wide)
        broken = ~v.isfinite().all(-1)  # [Hkv, b, K]
        v.masked_fill_(broken[..., None], 0)
        for i in range(0, q_len, q_step):
            queries = slice(i, min(i + q_step, q_len))
            sees = visible(view, site, rows, queries)
            part = _attend(q[view.query_at[rows, queries]].to(wide), k, v, sees, site.scale)
            hurt = (sees & broken[:, :, None]).any(-1)  # [Hkv, b, q]
            hurt = hurt.permute(1, 2, 0).repeat_interleave(heads // k.shape[0], 2)
            out[rows, queries] = part.masked_fill_(hurt[..., None], torch.nan).to(q.dtype)
    return out.flatten(0, 1)[view.back].masked_fill_(view.dead[:, None, None], 0)


def _attend(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float) -> Tensor:
    """All queries of some rows at once.

    Args:
        q: [b, q, Hq, D].
        k: [Hkv, b, K, D].
        v: [Hkv, b, K, D], finite.
        sees: [b, q, K] bool.
        scale: of the scores.

    Returns:
        [b, q, Hq, D].
    """
    b, num_queries, num_heads, dim = q.shape
    kv_heads = k.shape[0]
    group = num_heads // kv_heads
    grouped = (q * scale).view(b, num_queries, kv_heads, group, dim).permute(2, 0, 3, 1, 4)
    packed = grouped.reshape(kv_heads, b, group * num_queries, dim)
    scores = (packed @ k.transpose(2, 3)).view(kv_heads, b, group, num_queries, -1)
    hidden = ~sees[:, None]
    scores.masked_fill_(hidden, -torch.inf)
    # The second fill makes zeros of the NaN that a query without any visible key has.
    probs = scores.softmax(-1).masked_fill_(hidden, 0)
    out = (probs.flatten(2, 3) @ v).view(kv_heads, b, group, num_queries, dim)
    return out.permute(1, 3, 0, 2, 4).reshape(b, num_queries, num_heads, dim)
