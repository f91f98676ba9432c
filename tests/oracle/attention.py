"""Attention by loops: what a query sees, said once more, one query and one key at a time.

Also builds passes of every kind that the engine and its drafters make (`SCENES`), over a pool in
which everything that nobody may see is NaN. Used for the reference and for every backend.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.batch import AttnSite, ForwardBatch, ForwardMode
from paceline.kv.layout import Heads
from paceline.kv.pool import KVPool

LAYER, NUM_LAYERS = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a pass. `sees[i]` are the tail keys that query i sees; None: causal.

    The tail is `earlier` keys that are in the pool already, then the queries. `depths[i]` is a
    query's position minus the prefix length.
    """

    prefix: int
    depths: list[int]
    sees: list[list[int]] | None = None
    earlier: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A pass and everything that attention is given."""

    batch: ForwardBatch
    pool: KVPool
    q: Tensor
    k: Tensor
    v: Tensor
    rows: list[Row]


def tree(prefix: int, parents: list[int]) -> Row:
    """Verify a tree: parents[0] is -1, each node sees its ancestors and itself."""
    sees, depths = [[0]], [0]
    for i, p in enumerate(parents[1:], 1):
        sees.append([*sees[p], i])
        depths.append(depths[p] + 1)
    return Row(prefix=prefix, depths=depths, sees=sees)


def chain(prefix: int, n: int) -> Row:
    """Verify a chain, with its mask bits written out."""
    return tree(prefix, list(range(-1, n - 1)))


def causal(prefix: int, n: int, earlier: int = 0) -> Row:
    """A chunk of a prompt, or a chain without a mask."""
    return Row(prefix=prefix, depths=[earlier + i for i in range(n)], earlier=earlier)


def block(prefix: int, n: int) -> Row:
    """A DFlash block: every query sees the whole block."""
    return Row(prefix=prefix, depths=list(range(n)), sees=[list(range(n))] * n)


def growth(prefix: int) -> Row:
    """EAGLE growing four wide: tail 0-3 of depth 0, 4-7 of depth 1, two queries of depth 2.

    The siblings that grew no further, 0, 2, 4 and 6, are seen by nobody.
    """
    return Row(prefix=prefix, depths=[2, 2], earlier=8, sees=[[1, 7, 8], [3, 5, 9]])


BLOCK_SCENES: dict[str, list[Row]] = {
    "decode": [chain(7, 1), chain(0, 1), chain(20, 1), chain(16, 1)],
    "decode without mask": [causal(7, 1), causal(0, 1), causal(33, 1)],
    "verify a chain": [chain(9, 5), chain(0, 5), chain(31, 5)],
    "verify a chain without mask": [causal(9, 5), causal(12, 2)],
    "verify trees": [
        tree(5, [-1, 0, 0, 1]),
        tree(30, [-1, 0, 1, 1, 0, 4, 2, 2]),
        tree(0, [-1]),
        tree(18, [-1, 0, 0, 0, 2]),
    ],
    "a row without queries": [chain(4, 2), Row(prefix=6, depths=[], sees=[]), chain(8, 3)],
    "an EAGLE draft step": [growth(10), growth(3)],
    "DFlash blocks": [block(13, 4), block(2, 4)],
    "a tail of just 64 nodes": [tree(2, [-1, *(i // 3 for i in range(63))]), chain(80, 2)],
    "a tail of more than 64 nodes": [tree(6, [-1, *(i // 2 for i in range(69))]), chain(3, 2)],
}
EXTEND_SCENES: dict[str, list[Row]] = {
    "prompts": [causal(0, 13), causal(0, 1), causal(0, 34)],
    "chunks": [causal(16, 16), causal(5, 9)],
    "a chunk whose tail began before": [causal(4, 6, earlier=5), causal(0, 3, earlier=2)],
    "one long row": [causal(3, 150)],
}
SCENES = BLOCK_SCENES | EXTEND_SCENES


def build(
    name: str,
    *,
    dtype: torch.dtype = torch.float64,
    layout: Heads | None = None,
    num_heads: int = 4,
    page_size: int = 4,
    num_dead: int = 3,
    num_padding: int = 2,
    seed: int = 0,
) -> Scene:
    """Lay a scene out in a pool of shuffled pages, with padding rows and dead tokens at the end.

    Dead tokens carry NaN; so does every slot of the pool that holds no key which somebody sees.
    """
    return lay_out(
        SCENES[name],
        ForwardMode.BLOCK if name in BLOCK_SCENES else ForwardMode.EXTEND,
        dtype=dtype,
        layout=layout or Heads(2, 8),
        num_heads=num_heads,
        page_size=page_size,
        num_dead=num_dead,
        num_padding=num_padding,
        seed=seed,
    )


def lay_out(
    rows: list[Row],
    mode: ForwardMode,
    *,
    dtype: torch.dtype,
    layout: Heads,
    num_heads: int,
    page_size: int,
    num_dead: int = 3,
    num_padding: int = 2,
    seed: int = 0,
) -> Scene:
    """Lay any rows out, as `build` does; all with `sees` or all without."""
    gen = torch.Generator().manual_seed(seed)
    counts = [len(row.depths) for row in rows]
    tails = [row.earlier + n for row, n in zip(rows, counts, strict=True)]
    lens = [row.prefix + tail for row, tail in zip(rows, tails, strict=True)]
    per_row = max(-(-n // page_size) for n in lens) + 1
    pool = KVPool(layout, NUM_LAYERS, len(rows) * per_row, page_size, dtype, "cpu")
    pool.k.fill_(torch.nan)
    pool.v.fill_(torch.nan)
    order = torch.randperm(pool.num_pages, generator=gen).view(len(rows), per_row)
    # Half of the rows in runs of pages, as the allocator gives them; the others scattered.
    order[::2] = order[::2].flatten().sort().values.view(-1, per_row)
    padded = torch.full((num_padding, per_row), pool.dummy_page)
    total = sum(counts) + num_dead
    pages = torch.cat([order, padded]).int()
    positions = torch.zeros(total, dtype=torch.int64)
    slots = torch.full((total,), -1)
    cu_q = torch.tensor([0, *torch.tensor(counts).cumsum(0), *[sum(counts)] * num_padding])
    masked = rows[0].sees is not None
    words = -(-max(tails) // 64)
    bits = [0] * total
    for b, row in enumerate(rows):
        places = [_slot(pages, b, p, page_size) for p in range(lens[b])]
        start = int(cu_q[b])
        for i in range(counts[b]):
            positions[start + i] = row.prefix + row.depths[i]
            slots[start + i] = places[row.prefix + row.earlier + i]
            bits[start + i] = sum(1 << j for j in row.sees[i]) if row.sees else 0
        for p in range(row.prefix + row.earlier):
            if p < row.prefix or row.sees is None or any(p - row.prefix in s for s in row.sees):
                old = torch.randn(2, layout.num_heads, layout.head_dim, generator=gen).to(dtype)
                pool.k[LAYER, :, places[p]], pool.v[LAYER, :, places[p]] = old
    heads = (layout.num_heads, num_heads, layout.head_dim)
    k, q, v = (
        torch.randn(total, n, heads[2], generator=gen, dtype=torch.float64).to(dtype)
        for n in (heads[0], heads[1], heads[0])
    )
    for x in (q, k, v):
        x[sum(counts) :] = torch.nan
    zeros = [0] * num_padding
    batch = ForwardBatch(
        mode=mode,
        num_rows=len(rows),
        q_len=max(counts),
        rows=torch.arange(len(rows) + num_padding),
        token_ids=torch.zeros(total, dtype=torch.int64),
        positions=positions,
        slots=slots,
        prefix_lens=torch.tensor([row.prefix for row in rows] + zeros),
        cu_q=cu_q,
        tail_lens=torch.tensor(tails + zeros),
        mask=torch.tensor([_words(n, words) for n in bits]) if masked else None,
        pages=pages,
    )
    batch.check()
    return Scene(batch=batch, pool=pool, q=q, k=k, v=v, rows=rows)


def attend(scene: Scene, site: AttnSite) -> Tensor:
    """The scene's result by definition, in float64: [T, Hq, D]; zeros for dead tokens."""
    batch, pool = scene.batch, scene.pool
    pool.write(site.index, batch.slots, scene.k, scene.v)
    out = torch.zeros(scene.q.shape, dtype=torch.float64)
    for b, row in enumerate(scene.rows):
        start = int(batch.cu_q[b])
        for i in range(len(row.depths)):
            at = [_slot(batch.pages, b, p, pool.page_size) for p in _visible(row, i, site)]
            out[start + i] = _softmax_attention(
                scene.q[start + i].double(),
                pool.k[site.index][:, at].double(),
                pool.v[site.index][:, at].double(),
                site.scale,
            )
    return out


def on(scene: Scene, device: str) -> Scene:
    """The same scene on another device, before anything was computed on it."""
    batch, old = scene.batch, scene.pool
    moved = {
        field.name: value.to(device)
        for field in dataclasses.fields(ForwardBatch)
        if isinstance(value := getattr(batch, field.name), Tensor)
    }
    pool = KVPool(old.layout, NUM_LAYERS, old.num_pages, old.page_size, old.dtype, device)
    pool.k.copy_(old.k)
    pool.v.copy_(old.v)
    return Scene(
        batch=dataclasses.replace(batch, **moved),
        pool=pool,
        q=scene.q.to(device),
        k=scene.k.to(device),
        v=scene.v.to(device),
        rows=scene.rows,
    )


def every_site(head_dim: int) -> list[AttnSite]:
    """All kinds of sites that layers have: full and sliding, either tail rule."""
    make: Callable[..., AttnSite] = AttnSite
    return [
        make(index=LAYER, scale=1 / math.sqrt(head_dim), window=window, tail=tail)
        for window in (None, 1, 3, 16)
        for tail in ("mask", "causal")
    ]


def _visible(row: Row, query: int, site: AttnSite) -> list[int]:
    """Places of the keys that a query sees."""
    own = row.prefix + row.depths[query]
    places = []
    for place in range(row.prefix + row.earlier + len(row.depths)):
        j = place - row.prefix
        position, is_query = place, j >= row.earlier
        if is_query:
            position = row.prefix + row.depths[j - row.earlier]
        if j >= 0:
            if row.sees is None:
                if j > row.earlier + query:
                    continue
            elif j not in row.sees[query]:
                continue
            if site.tail == "causal" and is_query and position > own:
                continue
        if site.window is not None and position <= own - site.window:
            continue
        places.append(place)
    return places


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Of q [Hq, D] over k and v [Hkv, n, D], the visible keys only: [Hq, D]."""
    group = q.shape[0] // k.shape[0]
    return torch.stack(
        [
            (k[h // group] @ q[h] * scale).softmax(0) @ v[h // group]
            if k.shape[1]
            else torch.zeros_like(q[h])
            for h in range(q.shape[0])
        ]
    )


def _slot(pages: Tensor, row: int, place: int, page_size: int) -> int:
    return int(pages[row, place // page_size]) * page_size + place % page_size


def _words(bits: int, num_words: int) -> list[int]:
    """Signed 64-bit words of a bit set, lowest first."""
    words = [(bits >> (64 * w)) & (2**64 - 1) for w in range(num_words)]
    return [w - 2**64 if w >> 63 else w for w in words]
