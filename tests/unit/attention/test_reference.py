"""ReferenceAttention against loops: every kind of pass, window, tail rule and dtype."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.attention.base import PagedAttend
from paceline.attention.reference import ReferenceAttention
from paceline.core.batch import AttnSite, ForwardBatch, ForwardMode
from paceline.kv.layout import Heads
from paceline.kv.pool import KVPool
from paceline.ops.reference.attention import padded_view, paged_attention
from tests.oracle import attention as oracle

SITE = AttnSite(index=oracle.LAYER, scale=0.3)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def run(scene: oracle.Scene, site: AttnSite) -> torch.Tensor:
    """As the engine does it: plan, write, attend."""
    backend = ReferenceAttention()
    backend.plan(scene.batch)
    return PagedAttend(backend, scene.pool, scene.batch).heads(site, scene.q, scene.k, scene.v)


@pytest.mark.parametrize("name", oracle.SCENES)
def test_every_kind_of_pass_sees_what_it_should(name: str) -> None:
    """Each row of the table of BLOCK's uses, and EXTEND; with windows and both tail rules.

    All that nobody may see is NaN, so one key too many shows.
    """
    for site in oracle.every_site(head_dim=8):
        scene = oracle.build(name)
        out = run(scene, site)
        assert torch.allclose(out, oracle.attend(scene, site), rtol=0, atol=1e-12), site


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["verify trees", "prompts"])
def test_every_dtype_is_summed_wide(name: str, dtype: torch.dtype) -> None:
    """Half-precision inputs, single-precision sums: only the result is rounded, once."""
    scene = oracle.build(name, dtype=dtype)
    out = run(scene, SITE)
    assert out.dtype == dtype
    want = oracle.attend(scene, SITE)
    once = 0.51 * torch.finfo(dtype).eps
    sums = 1e-12 if dtype == torch.float64 else 2e-6
    assert torch.allclose(out.double(), want, rtol=once, atol=sums)


@pytest.mark.parametrize("kv_heads, heads", [(1, 1), (3, 3), (3, 9), (1, 5)])
def test_query_heads_share_key_heads_in_order(kv_heads: int, heads: int) -> None:
    """Grouped, multi-query and multi-head: query head h reads key head h // group."""
    scene = oracle.build("verify trees", layout=Heads(kv_heads, 4), num_heads=heads)
    assert torch.allclose(run(scene, SITE), oracle.attend(scene, SITE), rtol=0, atol=1e-12)


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_any_page_size(page_size: int) -> None:
    """Pages that are smaller than a tail, do not divide a row, or hold it all."""
    scene = oracle.build("chunks", page_size=page_size)
    assert torch.allclose(run(scene, SITE), oracle.attend(scene, SITE), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", oracle.SCENES)
def test_parts_of_rows_and_queries_give_the_same(name: str) -> None:
    """Long prompts are computed in parts, so that scores never take gigabytes."""
    scene = oracle.build(name)
    site = dataclasses.replace(SITE, window=6, tail="causal")
    want = run(scene, site)
    view = padded_view(scene.batch, scene.pool.page_size)
    k, v = scene.pool.k[oracle.LAYER], scene.pool.v[oracle.LAYER]
    for max_bytes in (1, 5_000, 20_000):
        out = paged_attention(scene.q, k, v, view, site, max_bytes)
        assert torch.allclose(out, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name, limit", [("one long row", 200_000), ("prompts", 20_000)])
def test_parts_stay_within_the_limit(
    name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on scores is kept, and not by computing query after query."""
    from paceline.ops.reference import attention as module

    scene = oracle.build(name)
    run(scene, SITE)
    sizes = []
    whole = module._attend

    def spy(q, k, v, sees, scale):
        sizes.append(sees.numel() * q.shape[2] * 8)
        return whole(q, k, v, sees, scale)

    monkeypatch.setattr(module, "_attend", spy)
    view = padded_view(scene.batch, scene.pool.page_size)
    k, v = scene.pool.k[oracle.LAYER], scene.pool.v[oracle.LAYER]
    paged_attention(scene.q, k, v, view, SITE, limit)
    assert max(sizes) <= limit
    assert len(sizes) <= 4 + 2 * sum(sizes) // limit


def test_dead_tokens_get_zeros_and_touch_nobody() -> None:
    """Dead tokens are garbage by contract; zeros keep the layers above them finite."""
    scene = oracle.build("verify trees", num_dead=4)
    out = run(scene, SITE)
    live = int(scene.batch.cu_q[-1])
    assert torch.equal(out[live:], torch.zeros_like(out[live:]))
    assert out[:live].isfinite().all()


def test_a_broken_node_breaks_only_those_who_see_it() -> None:
    """One draft branch overflows in float16; its sibling, the right one, must not be lost."""
    scene = oracle.build("verify trees")  # first row: root 0, a 1, b 2, c 3 below a
    for value in (torch.nan, torch.inf):
        scene.v[1, 0] = value
        out = run(scene, SITE)
        whole = ~out.isnan().any(-1)  # [T, Hq]
        assert whole[[0, 2]].all()
        assert whole[4:].all()
        assert not whole[[1, 3]][:, :2].any()  # query heads 0, 1 read key head 0
        assert whole[[1, 3]][:, 2:].all()
    scene.v[1, 0], scene.k[1, 0] = 1.0, torch.nan
    whole = ~run(scene, SITE).isnan().any(-1)
    assert whole[[0, 2]].all()
    assert not whole[[1, 3]][:, :2].any()


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    """A softmax over nothing is NaN, and NaN spreads."""
    scene = oracle.build("decode")
    assert scene.batch.mask is not None
    scene.batch.mask[1] = 0  # the row without a prefix
    out = run(scene, SITE)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out.isfinite().all()


def test_layers_share_one_layout_and_a_new_pass_drops_it() -> None:
    """A pass whose tensors are written in place, as under graph replay, is laid out anew."""
    first, second = oracle.build("chunks"), oracle.build("chunks", seed=1)
    backend = ReferenceAttention()
    backend.plan(first.batch)
    attend = PagedAttend(backend, first.pool, first.batch)
    attend.heads(SITE, first.q, first.k, first.v)
    view = backend._view
    attend.heads(SITE, first.q, first.k, first.v)
    assert backend._view is view
    first.batch.pages.copy_(second.batch.pages)
    first.batch.slots.copy_(second.batch.slots)
    backend.plan(first.batch)
    out = PagedAttend(backend, second.pool, first.batch).heads(SITE, second.q, second.k, second.v)
    assert torch.allclose(out, oracle.attend(second, SITE), rtol=0, atol=1e-12)
    other = oracle.build("decode")  # another batch without a plan: never the old layout
    out = PagedAttend(backend, other.pool, other.batch).heads(SITE, other.q, other.k, other.v)
    assert torch.allclose(out, oracle.attend(other, SITE), rtol=0, atol=1e-12)


def test_an_empty_pass_is_zeros() -> None:
    """A pass of padding only, as an idle rank runs it."""
    scene = oracle.build("decode")
    empty = dataclasses.replace(scene.batch, num_rows=0, cu_q=torch.zeros(7, dtype=torch.int64))
    out = ReferenceAttention().heads(SITE, scene.q, scene.pool, empty)
    assert torch.equal(out, torch.zeros_like(scene.q))


@pytest.mark.parametrize("name", ["verify trees", "chunks"])
def test_on_an_accelerator_nothing_is_read_back(name: str) -> None:
    """Lengths live on the device: a read would stall every step. `meta` tensors can't be read."""
    scene = oracle.on(oracle.build(name), "meta")
    out = run(scene, dataclasses.replace(SITE, window=5, tail="causal"))
    scene.pool.move(scene.batch.slots, scene.batch.slots)
    assert out.shape == scene.q.shape


@pytest.mark.gpu
@pytest.mark.parametrize("name", oracle.SCENES)
def test_on_cuda_every_pass_is_the_same_and_nothing_waits(name: str) -> None:
    """Drafters are trained on this path: same results as on a CPU, and no host sync in a layer."""
    for site in oracle.every_site(head_dim=8):
        scene = oracle.build(name)
        moved = oracle.on(scene, "cuda")
        want = oracle.attend(scene, site)
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = run(moved, site)
            moved.pool.move(moved.batch.slots, moved.batch.slots)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.allclose(out.cpu(), want, rtol=0, atol=1e-12), site


@pytest.mark.parametrize("name", oracle.SCENES)
def test_all_that_the_table_holds_may_be_laid_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device the host does not know the longest row; what lies behind a row is hidden."""
    from paceline.ops.reference import attention as module

    monkeypatch.setattr(module, "_num_keys", lambda batch, size: batch.pages.shape[1] * size)
    scene = oracle.build(name)
    wide = torch.full((scene.batch.pages.shape[0], 9), scene.pool.dummy_page, dtype=torch.int32)
    batch = dataclasses.replace(scene.batch, pages=torch.cat([scene.batch.pages, wide], 1))
    for site in oracle.every_site(head_dim=8):
        out = run(dataclasses.replace(scene, batch=batch), site)
        assert torch.allclose(out, oracle.attend(scene, site), rtol=0, atol=1e-12)


def test_more_queries_than_the_batch_says_is_a_bug() -> None:
    """A wrong host value would send queries to the next row without a word."""
    scene = oracle.build("verify trees")
    with pytest.raises(AssertionError, match="more queries than q_len"):
        run(dataclasses.replace(scene, batch=dataclasses.replace(scene.batch, q_len=3)), SITE)


def test_a_tail_beyond_the_mask_is_a_bug() -> None:
    """Bits that are not there would be read as some other key's."""
    scene = oracle.build("a tail of more than 64 nodes")
    assert scene.batch.mask is not None
    short = dataclasses.replace(scene.batch, mask=scene.batch.mask[:, :1])
    with pytest.raises(AssertionError, match="longer than the mask"):
        run(dataclasses.replace(scene, batch=short), SITE)


def test_only_numbers_are_refused() -> None:
    """The reference is the backend of last resort."""
    refuses = ReferenceAttention().refuses
    for dtype in DTYPES:
        assert refuses(Heads(3, 64), torch.device("cuda"), dtype, 16) is None
    assert refuses(Heads(3, 64), torch.device("cpu"), torch.int8, 16) is not None
    assert "scales" in str(refuses(Heads(3, 64), torch.device("cpu"), torch.float8_e4m3fn, 16))


@given(data=st.data())
def test_chunks_of_a_prompt_equal_the_whole(data: st.DataObject) -> None:
    """Chunked prefill: however a prompt is cut, each token attends to all before it."""
    n = data.draw(st.integers(1, 24))
    cuts = sorted(data.draw(st.sets(st.integers(1, n))) | {n})
    gen = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(n, h, 4, generator=gen, dtype=torch.float64) for h in (4, 2, 2))
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * SITE.scale
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(2, 1))
    pool = KVPool(Heads(2, 4), 2, 12, 2, torch.float64, "cpu")
    pages = torch.randperm(12, generator=gen).int()[None]
    backend, parts, start = ReferenceAttention(), [], 0
    for stop in cuts:
        places = torch.arange(start, stop)
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND,
            num_rows=1,
            q_len=stop - start,
            rows=torch.zeros(1, dtype=torch.int64),
            token_ids=places,
            positions=places,
            slots=pages[0, places // 2].long() * 2 + places % 2,
            prefix_lens=torch.tensor([start]),
            cu_q=torch.tensor([0, stop - start]),
            tail_lens=torch.tensor([stop - start]),
            mask=None,
            pages=pages,
        )
        backend.plan(batch)
        attend = PagedAttend(backend, pool, batch)
        parts.append(attend.heads(SITE, q[start:stop], k[start:stop], v[start:stop]))
        start = stop
    assert torch.allclose(torch.cat(parts), want, rtol=0, atol=1e-12)
