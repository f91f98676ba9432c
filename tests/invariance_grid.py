"""Passes for the batch-invariant kernels: one text, computed in every company that an engine puts it in.

Used in Triton's interpreter (`tests/interpreted/triton_invariance.py`) and on a GPU
(`tests/gpu/test_invariance.py`). Everything that nobody may see is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.attention.base import PagedAttend
from paceline.attention.triton_invariant import InvariantTritonAttention
from paceline.core.batch import AttnSite, ForwardBatch, ForwardMode
from paceline.kv.layout import Heads
from paceline.kv.pool import KVPool
from paceline.ops.triton import product_invariant as products
from tests.tolerance import RELATIVE, close

EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Queries, keys and values of a text, a layer's."""

    q: Tensor  # [L, Hq, D]
    k: Tensor  # [L, Hkv, D]
    v: Tensor  # [L, Hkv, D]


def text(
    length: int,
    *,
    dtype: torch.dtype,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 64,
    seed: int = 0,
) -> Text:
    """Any text."""
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(length, heads, dim, generator=gen).to(dtype)
        for heads in (kv_heads * group, kv_heads, kv_heads)
    )
    return Text(q=q, k=k, v=v)


@dataclass(frozen=True, slots=True)
class Seen:
    """A row of a pass over a text: its cached part and its nodes, as parents and whether they are text.

    A node that is not text is a branch that was drafted in vain: its key is anything, or NaN.
    """

    of: Text
    prefix: int
    parents: Sequence[int]
    right: Sequence[bool]


def depths_of(parents: Sequence[int]) -> list[int]:
    """Of each node."""
    found = [0]
    for parent in parents[1:]:
        found.append(found[parent] + 1)
    return found


def run(of: Text, prefix: int, count: int) -> Seen:
    """The next tokens of a text, one after the other."""
    return Seen(of, prefix, list(range(-1, count - 1)), [True] * count)


def bushy(of: Text, prefix: int, depth: int, wrong: int) -> Seen:
    """A path of the text with `wrong` false children at each node before its true one."""
    parents, right, last = [-1], [True], 0
    for _ in range(depth):
        parents += [last] * (wrong + 1)
        right += [False] * wrong + [True]
        last = len(parents) - 1
    return Seen(of, prefix, parents, right)


def batch_of(
    rows: Sequence[tuple[int, Sequence[int]]],
    pages: Tensor,
    *,
    page_size: int,
    device: str,
    mode: ForwardMode = ForwardMode.BLOCK,
    masked: bool = True,
    num_dead: int = 0,
    token_ids: Sequence[int] = (),
) -> ForwardBatch:
    """A pass of rows, each of a prefix and its nodes' parents.

    Args:
        rows: lengths of prefixes, and parents.
        pages: [B, G] int32.
        page_size: tokens per page.
        device: where.
        mode: of the pass.
        masked: with ancestor bits; without, all nodes must be a run.
        num_dead: dead tokens at the end.
        token_ids: of all nodes; none: zeros.
    """
    counts = [len(parents) for _, parents in rows]
    total = sum(counts) + num_dead
    positions, slots = torch.zeros(total, dtype=torch.int64), torch.full((total,), -1)
    words = -(-max(counts) // 64)
    mask = torch.zeros(total, words, dtype=torch.int64)
    at = 0
    for own, (prefix, parents) in zip(pages.tolist(), rows, strict=True):
        bits: list[int] = []
        for i, (parent, depth) in enumerate(zip(parents, depths_of(parents), strict=True)):
            bits.append((bits[parent] if parent >= 0 else 0) | 1 << i)
            place = prefix + i
            positions[at] = prefix + depth
            slots[at] = own[place // page_size] * page_size + place % page_size
            for w in range(words):
                word = bits[i] >> 64 * w & 2**64 - 1
                mask[at, w] = word - 2**64 if word >> 63 else word
            at += 1
    tails = torch.tensor(counts)
    ids = torch.zeros(total, dtype=torch.int64)
    ids[: len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64)
    return ForwardBatch(
        mode=mode,
        num_rows=len(rows),
        q_len=max(counts),
        rows=torch.arange(len(rows)).to(device),
        token_ids=ids.to(device),
        positions=positions.to(device),
        slots=slots.to(device),
        prefix_lens=torch.tensor([prefix for prefix, _ in rows]).to(device),
        cu_q=torch.tensor([0, *tails.cumsum(0)]).to(device),
        tail_lens=tails.to(device),
        mask=mask.to(device) if masked else None,
        pages=pages.to(device),
    )


def attend(
    rows: Sequence[Seen],
    *,
    device: str,
    mode: ForwardMode = ForwardMode.BLOCK,
    masked: bool = True,
    page_size: int = 16,
    wider: int = 0,
    num_dead: int = 0,
    split: bool | None = None,
    window: int | None = None,
    seed: int = 0,
) -> list[dict[int, Tensor]]:
    """Attention of a pass: for each row what the nodes that are text have, by place in the text.

    Args:
        rows: who shares the pass.
        device: where.
        mode: of the pass.
        masked: see `batch_of`.
        page_size: tokens per page.
        wider: pages that the page table has beyond the longest row.
        num_dead: dead tokens at the end.
        split: see `InvariantTritonAttention`.
        window: of the layer.
        seed: of pages and of false branches.
    """
    gen = torch.Generator().manual_seed(seed)
    one = rows[0].of
    dtype, (_, kv_heads, dim), q_heads = one.k.dtype, one.k.shape, one.q.shape[1]
    counts = [len(row.parents) for row in rows]
    per_row = max(-(-(row.prefix + n) // page_size) for row, n in zip(rows, counts, strict=True))
    pool = KVPool(Heads(kv_heads, dim), 1, len(rows) * per_row, page_size, dtype, "cpu")
    pool.k.fill_(torch.nan)
    pool.v.fill_(torch.nan)
    pages = torch.randperm(pool.num_pages, generator=gen).view(len(rows), per_row).int()
    total = sum(counts) + num_dead
    q, k, v = (
        torch.full((total, heads, dim), torch.nan, dtype=dtype)
        for heads in (q_heads, kv_heads, kv_heads)
    )
    at = 0
    for b, row in enumerate(rows):
        place = torch.arange(row.prefix)
        slot = pages[b, place // page_size] * page_size + place % page_size
        pool.k[0, :, slot] = row.of.k[: row.prefix].transpose(0, 1)
        pool.v[0, :, slot] = row.of.v[: row.prefix].transpose(0, 1)
        for i, depth in enumerate(depths_of(row.parents)):
            for to, source in ((q, row.of.q), (k, row.of.k), (v, row.of.v)):
                if row.right[i]:
                    to[at] = source[row.prefix + depth]
                elif i % 2 or to is q:  # others' keys and values are NaN
                    to[at] = torch.randn(to.shape[1:], generator=gen).to(dtype)
            at += 1
    padding = torch.full((len(rows), wider), pool.dummy_page, dtype=torch.int32)
    batch = batch_of(
        [(row.prefix, row.parents) for row in rows],
        torch.cat([pages, padding], dim=1),
        page_size=page_size,
        device=device,
        mode=mode,
        masked=masked,
        num_dead=num_dead,
    )
    there = KVPool(pool.layout, 1, pool.num_pages, page_size, dtype, device)
    there.k.copy_(pool.k)
    there.v.copy_(pool.v)
    backend = InvariantTritonAttention(split)
    backend.plan(batch)
    site = AttnSite(index=0, scale=dim**-0.5, window=window)
    out = PagedAttend(backend, there, batch).heads(site, *(x.to(device) for x in (q, k, v))).cpu()
    assert (out[at:] == 0).all(), "a dead token has zeros"
    found, start = [], 0
    for row in rows:
        right = [(i, d) for i, d in enumerate(depths_of(row.parents)) if row.right[i]]
        found.append({row.prefix + depth: out[start + i] for i, depth in right})
        start += len(row.parents)
    return found


def exact(of: Text, window: int | None = None) -> Tensor:
    """Attention of a whole text in float64: [L, Hq, D]."""
    length, heads, dim = of.q.shape
    group = heads // of.k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (of.q, of.k, of.v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    ago = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (ago < 0) | (ago >= (window or length))
    scores = (q @ k.transpose(1, 2) * dim**-0.5).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def companies(of: Text, other: Text, unit: int) -> Mapping[str, list[Seen]]:
    """Passes with ancestor bits in which the text is verified, at borders of tiles and units of `unit`."""
    end = of.q.shape[0]
    return {
        "one node": [run(of, unit - 1, 1)],
        "a chain over a border": [run(of, unit - 3, 7)],
        "a chain at the end, in company": [
            run(other, 3, 2),
            run(of, end - 9, 9),
            run(other, unit, 4),
        ],
        "a tree": [bushy(of, unit - 2, 5, 2)],
        "a tree of 32 in company": [
            run(other, unit - 1, 3),
            bushy(of, end - 9, 6, 4),
            bushy(other, 0, 1, 1),
        ],
        "a tree of two words": [bushy(of, unit - 9, 10, 6)],
    }


def bits_are_one_set(
    of: Text,
    other: Text,
    *,
    device: str,
    unit: int,
    step: int,
    window: int | None = None,
    every: int = 1,
) -> None:
    """Alone, in chains, trees, chunks and company: a token of the text has the same bits everywhere.

    Args:
        of: the text.
        other: of the company.
        device: where.
        unit: keys of a unit.
        step: places of the text that are looked at are so far apart.
        window: of the layer.
        every: of the companies and chunks only every so-manieth.
    """
    length = of.q.shape[0]
    options: dict[str, Any] = {"device": device, "window": window}
    alone: dict[int, Tensor] = {}
    places = sorted({*range(0, length, step), unit - 1, unit, length - 1})
    for place in places:
        for split in (False, True):
            (found,) = attend([run(of, place, 1)], masked=False, split=split, **options)
            assert torch.equal(alone.setdefault(place, found[place]), found[place]), (place, split)
    truth = exact(of, window)
    assert close(torch.stack([alone[p] for p in places]), truth[places])

    def same(found: Mapping[int, Tensor], what: str) -> None:
        for place, value in found.items():
            if place not in alone:
                alone.update(attend([run(of, place, 1)], masked=False, **options)[0])
            assert torch.equal(value, alone[place]), (what, place)

    for turn, (name, rows) in list(enumerate(companies(of, other, unit).items()))[::every]:
        varied: dict[str, Any] = {"wider": turn, "num_dead": turn, "seed": turn}
        for split in (False, True):
            for row, found in zip(
                rows, attend(rows, split=split, **varied, **options), strict=True
            ):
                if row.of is of:
                    same(found, name)
    for start, stop in ((unit - 5, length), (0, length), (unit // 2, unit + 3))[::every]:
        rows = [run(other, 2, 3), run(of, start, stop - start)]
        chunk = attend(rows, mode=ForwardMode.EXTEND, masked=False, **options)[1]
        same({place: value for place, value in chunk.items() if place % step == 0}, "a chunk")


def product_bits(
    n: int, k: int, counts: Sequence[int], *, dtype: torch.dtype, device: str, bias: bool
) -> None:
    """All three products: near float64, and a row's bits the same for every number of rows."""
    most = max(counts)
    gen = torch.Generator().manual_seed(n + k)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(dtype).to(device)

    x, residual, gain = normal(most, k), normal(most, n), normal(n)
    weight = (normal(n, k).float() / k**0.5).to(dtype)
    shift = normal(n) if bias else None
    want = x.double() @ weight.double().T
    sums = products.linear_f32(x, weight)
    assert close(sums, want, 3e-5 if device == "cuda" else RELATIVE[torch.float32])
    out = products.linear(x, weight, shift)
    assert close(out, want if shift is None else want + shift.double())
    normed, stream = products.linear_add_rms_norm(x, weight, residual, gain, EPS, shift)
    whole = residual.double() + (want if shift is None else want + shift.double())
    assert close(stream, whole, 2 * RELATIVE[dtype])
    scale = (whole.square().mean(1, keepdim=True) + EPS).rsqrt()
    assert close(normed, whole * scale * gain.double(), 3 * RELATIVE[dtype])
    for count in counts:
        for start in {0, (most - count) // 2, most - count}:
            rows = slice(start, start + count)
            assert torch.equal(products.linear_f32(x[rows], weight), sums[rows]), (count, start)
            assert torch.equal(products.linear(x[rows], weight, shift), out[rows]), (count, start)
            found = products.linear_add_rms_norm(x[rows], weight, residual[rows], gain, EPS, shift)
            assert torch.equal(found[0], normed[rows]), (count, start)
            assert torch.equal(found[1], stream[rows]), (count, start)
