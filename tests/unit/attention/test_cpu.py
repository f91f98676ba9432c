"""The promise of the CPU's backends: a query's bits depend on its own visible keys, in order, only.

Of the own kernel, and of the plain PyTorch that serves where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from paceline.attention.base import AttentionBackend
from paceline.attention.cpu import CpuAttention
from paceline.attention.tiled import TiledAttention
from paceline.core.batch import AttnSite, ForwardBatch, ForwardMode
from paceline.kv.layout import Heads
from paceline.kv.pool import KVPool
from paceline.ops.cpu.build import built
from paceline.ops.cpu.native import DTYPES, native

needs_native = pytest.mark.skipif(native() is None, reason=f"no own kernels: {built().reason}")
PAGE = 16
backend_class: type[AttentionBackend] = TiledAttention


@pytest.fixture(
    params=[pytest.param(CpuAttention, marks=needs_native), TiledAttention], autouse=True
)
def _backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose promise it is this time."""
    monkeypatch.setitem(globals(), "backend_class", request.param)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One sequence's queries, keys and values for every place."""

    q: Tensor  # [n, Hq, D]
    k: Tensor  # [n, Hkv, D]
    v: Tensor


def text(n: int, layout: Heads, num_heads: int, dtype: torch.dtype, seed: int) -> Text:
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(n, heads, layout.head_dim, generator=gen).to(dtype)
        for heads in (num_heads, layout.num_heads, layout.num_heads)
    )
    return Text(q=q, k=k, v=v)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a pass: a text whose first `prefix` places are cached, then these tail places.

    `takes` are the text's places that the tail nodes stand for, `sees` the tail nodes that each
    node sees (None: causal).
    """

    text: Text
    prefix: int
    takes: list[int]
    sees: list[list[int]] | None = None


def attend(rows: list[Row], site: AttnSite, layout: Heads, seed: int = 0) -> Tensor:
    """Run one pass over a pool of scattered pages full of NaN; return [T, Hq, D]."""
    dtype = rows[0].text.q.dtype
    counts = [len(row.takes) for row in rows]
    per_row = max(row.prefix + n for row, n in zip(rows, counts, strict=True)) // PAGE + 1
    pool = KVPool(layout, 1, per_row * len(rows) + 3, PAGE, dtype, "cpu")
    pool.k.fill_(torch.nan)
    pool.v.fill_(torch.nan)
    order = torch.randperm(pool.num_pages, generator=torch.Generator().manual_seed(seed))
    pages = order[: per_row * len(rows)].view(len(rows), per_row).int()
    for b, row in enumerate(rows):
        kept = torch.tensor([*range(row.prefix), *row.takes])
        places = torch.arange(row.prefix + len(row.takes))
        slots = pages[b, places // PAGE].long() * PAGE + places % PAGE
        pool.write(0, slots, row.text.k[kept], row.text.v[kept])
    masked = any(row.sees is not None for row in rows)
    words = -(-max(counts) // 64)
    mask = []
    for row in rows:
        for i in range(len(row.takes)):
            bits = sum(1 << j for j in (row.sees[i] if row.sees else range(i + 1)))
            cut = [(bits >> (64 * w)) & (2**64 - 1) for w in range(words)]
            mask.append([c - 2**64 if c >> 63 else c for c in cut])
    cu_q = torch.tensor([0, *counts]).cumsum(0)
    batch = ForwardBatch(
        mode=ForwardMode.BLOCK if masked else ForwardMode.EXTEND,
        num_rows=len(rows),
        q_len=max(counts),
        rows=torch.arange(len(rows)),
        token_ids=torch.zeros(int(cu_q[-1]), dtype=torch.int64),
        positions=torch.tensor([place for row in rows for place in row.takes]),
        slots=torch.full((int(cu_q[-1]),), -1),
        prefix_lens=torch.tensor([row.prefix for row in rows]),
        cu_q=cu_q,
        tail_lens=torch.tensor(counts),
        mask=torch.tensor(mask) if masked else None,
        pages=pages,
    )
    backend = backend_class()
    backend.plan(batch)
    q = torch.cat([row.text.q[row.takes] for row in rows])
    out = backend.heads(site, q, pool, batch)
    assert out.isfinite().all()
    return out


def alone(source: Text, place: int, site: AttnSite, layout: Heads, seed: int) -> Tensor:
    """Plain decode of one place."""
    row = Row(text=source, prefix=place, takes=[place], sees=[[0]])
    return attend([row], site, layout, seed)[0]


LAYOUTS = [
    (Heads(3, 64), 9),
    (Heads(1, 16), 4),
    (Heads(2, 32), 2),
    (Heads(2, 80), 14),
    (Heads(1, 128), 5),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout, num_heads", LAYOUTS)
def test_decode_chain_tree_and_prefill_agree(
    layout: Heads, num_heads: int, dtype: torch.dtype
) -> None:
    """Tails that cross the borders of pages and tiles; fragmented pages; siblings in between."""
    site = AttnSite(index=0, scale=layout.head_dim**-0.5)
    n = 150
    source = text(n, layout, num_heads, dtype, seed=1)
    prompt = attend([Row(text=source, prefix=0, takes=list(range(n)))], site, layout)
    for start in (0, 1, 14, 55, 60, 63, 64, 120, 127, 128):
        depth = min(12, n - start)
        places = list(range(start, start + depth))
        chain = Row(
            text=source, prefix=start, takes=places, sees=[list(range(i + 1)) for i in range(depth)]
        )
        found = attend([chain], site, layout, seed=start)
        assert torch.equal(found, prompt[places]), f"a chain from {start}"
        # A chunk of a prompt, without a mask.
        chunk = attend([Row(text=source, prefix=start, takes=places)], site, layout, seed=start + 1)
        assert torch.equal(chunk, found), f"a chunk from {start}"
        # The path's nodes with a wrong sibling before each but the root.
        takes, path, sees = [start], [0], [[0]]
        for place in places[1:]:
            takes += [place, place]
            sees += [[*path, len(takes) - 2], [*path, len(takes) - 1]]
            path.append(len(takes) - 1)
        wrong = Text(q=source.q, k=source.k.clone(), v=source.v)
        tree = attend([Row(text=wrong, prefix=start, takes=takes, sees=sees)], site, layout)
        assert torch.equal(tree[path], found), f"a tree from {start}"
        for i in (0, depth - 1):
            assert torch.equal(alone(source, places[i], site, layout, seed=7 + i), found[i])


def test_company_changes_no_bits() -> None:
    """A row alone, and among rows of other lengths, kinds and node counts, on several threads."""
    layout, num_heads, dtype = Heads(3, 64), 9, torch.bfloat16
    site = AttnSite(index=0, scale=0.125)
    sources = [text(300, layout, num_heads, dtype, seed=s) for s in range(6)]
    rows = [
        Row(text=s, prefix=40 * i, takes=list(range(40 * i, 40 * i + 3 * i + 1)))
        for i, s in enumerate(sources)
    ]
    torch.set_num_threads(3)
    try:
        together = attend(rows, site, layout, seed=3)
        start = 0
        for row in rows:
            lone = attend([row], site, layout, seed=4)
            assert torch.equal(lone, together[start : start + len(row.takes)])
            start += len(row.takes)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("window", [1, 5, 64, 70])
def test_windows_agree_too(window: int) -> None:
    """A window that ends in the prefix, in the tail, or on a tile's border: decode equals prefill."""
    layout, dtype = Heads(2, 32), torch.bfloat16
    site = AttnSite(index=0, scale=0.2, window=window)
    source = text(140, layout, 4, dtype, seed=2)
    prompt = attend([Row(text=source, prefix=0, takes=list(range(140)))], site, layout)
    for start in (0, 30, 60, 64, 125):
        places = list(range(start, start + 12))
        sees = [list(range(i + 1)) for i in range(12)]
        chain = Row(text=source, prefix=start, takes=places, sees=sees)
        assert torch.equal(attend([chain], site, layout), prompt[places]), start
        assert torch.equal(alone(source, places[-1], site, layout, 1), prompt[places[-1]]), start


def test_more_queries_than_a_group_walk_together() -> None:
    """Trees of more than 16 and more than 64 nodes: the parts agree with plain decode."""
    layout, dtype = Heads(1, 16), torch.float32
    site = AttnSite(index=0, scale=0.25)
    source = text(90, layout, 3, dtype, seed=5)
    sees: list[list[int]] = [[0]]
    takes = [20]
    for i in range(1, 70):
        parent = (i - 1) // 2
        sees.append([*sees[parent], i])
        takes.append(20 + len(sees[i]) - 1)
    tree = attend([Row(text=source, prefix=20, takes=takes, sees=sees)], site, layout)
    for i in (0, 15, 16, 17, 63, 64, 69):
        assert torch.equal(tree[i], alone(source, takes[i], site, layout, seed=i)), i


def test_keys_that_are_seen_do_matter() -> None:
    """The negative control: one changed key of the path changes the bits of those who see it."""
    layout, dtype = Heads(2, 32), torch.bfloat16
    site = AttnSite(index=0, scale=0.2)
    source = text(40, layout, 4, dtype, seed=6)
    other = Text(q=source.q, k=source.k.clone(), v=source.v)
    other.k[31] += 1
    first = attend([Row(text=source, prefix=30, takes=list(range(30, 36)))], site, layout)
    second = attend([Row(text=other, prefix=30, takes=list(range(30, 36)))], site, layout)
    same = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    assert same == [True, False, False, False, False, False]


def test_refusals_say_why() -> None:
    """The next backend serves what this one does not."""
    cpu, backend = torch.device("cpu"), backend_class()
    assert backend.refuses(Heads(3, 64), cpu, torch.bfloat16, 16) is None
    odd = backend.refuses(Heads(3, 40), cpu, torch.bfloat16, 16)
    assert odd is None if backend_class is TiledAttention else "multiples of 16" in str(odd)
    assert "not float64" in str(backend.refuses(Heads(3, 64), cpu, torch.float64, 16))
    elsewhere = torch.device("cuda")
    assert "not on cuda" in str(backend.refuses(Heads(3, 64), elsewhere, torch.bfloat16, 16))


def test_queries_of_another_dtype_than_the_pool() -> None:
    """A pool may be narrower than the network: float32 and float64 queries over bfloat16 keys."""
    layout = Heads(2, 32)
    site = AttnSite(index=0, scale=0.2)
    narrow = text(40, layout, 4, torch.bfloat16, seed=8)
    wide = attend([Row(text=narrow, prefix=20, takes=[20, 21])], site, layout)
    for dtype in (torch.float32, torch.float64):
        pool = KVPool(layout, 1, 4, PAGE, torch.bfloat16, "cpu")
        places = torch.arange(22)
        pool.write(0, places, narrow.k[:22], narrow.v[:22])
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND,
            num_rows=1,
            q_len=2,
            rows=torch.zeros(1, dtype=torch.int64),
            token_ids=torch.zeros(2, dtype=torch.int64),
            positions=torch.tensor([20, 21]),
            slots=torch.tensor([20, 21]),
            prefix_lens=torch.tensor([20]),
            cu_q=torch.tensor([0, 2]),
            tail_lens=torch.tensor([2]),
            mask=None,
            pages=torch.tensor([[0, 1]], dtype=torch.int32),
        )
        backend = backend_class()
        backend.plan(batch)
        found = backend.heads(site, narrow.q[20:22].to(dtype), pool, batch)
        assert found.dtype == dtype
        assert torch.allclose(found.float(), wide.float(), atol=2e-2)
