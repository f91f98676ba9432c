"""The Triton attention kernels, compiled: the definition, eager and replayed, in both 16-bit types."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from paceline.attention import choose
from paceline.attention.base import PagedAttend
from paceline.attention.triton import TritonAttention
from paceline.core.batch import AttnSite, ForwardMode
from paceline.core.device import used_memory
from paceline.kv.layout import Heads
from paceline.ops.triton.grid import Tiles
from tests import attention_grid as grid
from tests.gpu_capture import captured
from tests.oracle import attention as oracle
from tests.tolerance import close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DTYPES = [torch.bfloat16, torch.float16]
# Borders of all units that are chosen for so few rows.
OWN = grid.cases(unit=512)
SMALL = grid.cases(unit=grid.SMALL.unit)


def agrees(found: Tensor, want: Tensor, live: int) -> None:
    found = found.cpu()
    assert (found[live:] == 0).all(), "dead tokens give zeros"
    assert close(found[:live], want[:live])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(OWN))
def test_kernels_are_the_definition(name: str, dtype: torch.dtype) -> None:
    """Every kind of pass at borders of pages, tiles and units, with the tiles that are served."""
    case = dataclasses.replace(OWN[name], tiles=None, dtype=dtype)
    made = case.scene("cuda")
    live = int(made.batch.cu_q[-1])
    agrees(grid.attend(made, case), grid.definition(made, case.site), live)


@pytest.mark.parametrize(
    "numbers, last",
    [
        ((16, 64, 64, 1, 4, 2), True),
        ((16, 128, 128, 1, 4, 2), True),
        ((16, 32, 256, 128, 2, 4), True),
        ((16, 32, 256, 128, 1, 4), True),
        ((32, 128, 256, 128, 8, 3), True),
        ((64, 64, 256, 1, 4, 3), False),
        ((64, 64, 256, 128, 4, 3), True),
        ((64, 64, 320, 160, 4, 2), True),
        ((64, 32, 512, 256, 4, 6), True),
        ((64, 64, 8192, 4096, 4, 6), True),
        ((64, 128, 8192, 1, 8, 2), True),
        ((128, 64, 512, 256, 8, 3), False),
        ((128, 128, 256, 128, 8, 2), True),
    ],
    ids=str,
)
def test_other_tiles(numbers: tuple[int, int, int, int, int, int], last: bool) -> None:
    """What the benchmark tries and the table may come to hold: rows of none to six units."""
    m, n, unit, least, warps, stages = numbers
    case = grid.Case(
        rows=[
            *(oracle.chain(k, 16) for k in (0, 1300, *(unit * i % 4000 - 9 for i in (1, 3, 5)))),
            oracle.block(least + unit - 17, 16),
            oracle.growth(least + unit - 3),  # keys of the tail that nobody sees
        ],
        kv_heads=2,
        group=4,
        dim=128,
        tiles=Tiles(
            block_m=m,
            block_n=n,
            unit=unit,
            least=least,
            num_warps=warps,
            num_stages=stages,
            last_joins=last,
        ),
        dtype=torch.bfloat16,
    )
    made = case.scene("cuda")
    live = int(made.batch.cu_q[-1])
    agrees(grid.attend(made, case), grid.definition(made, case.site), live)


def test_more_programs_than_processors() -> None:
    """Thousands of programs, some of which start when others have ended: every row is joined, always."""
    lens = [37 * i % 300 for i in range(48)]
    case = grid.Case(
        rows=[oracle.chain(n, 3) for n in lens],
        kv_heads=8,
        group=4,
        tiles=dataclasses.replace(grid.SMALL, block_n=64),
        dtype=torch.bfloat16,
    )
    made = case.scene("cuda")
    live = int(made.batch.cu_q[-1])
    backend = TritonAttention(case.tiles)
    first = grid.attend_by(backend, made, case)
    agrees(first, grid.definition(made, case.site), live)
    for _ in range(50):
        assert torch.equal(grid.attend_by(backend, made, case), first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scene", list(oracle.BLOCK_SCENES))
def test_scenes_of_the_engine_and_its_drafters(scene: str, dtype: torch.dtype) -> None:
    """The conformance of backends: all scenes, sites and head sizes, through the registry's choice."""
    for dim in (64, 96, 128):
        layout = Heads(2, dim)
        backend, _ = choose(layout, torch.device("cuda"), dtype, 4)
        assert type(backend) is TritonAttention
        for site in oracle.every_site(dim):
            made = oracle.build(scene, dtype=dtype, layout=layout)
            want, live = oracle.attend(made, site), int(made.batch.cu_q[-1])
            made = oracle.on(oracle.build(scene, dtype=dtype, layout=layout), "cuda")
            backend.plan(made.batch)
            attend = PagedAttend(backend, made.pool, made.batch)
            agrees(attend.heads(site, made.q, made.k, made.v), want, live)


@pytest.mark.parametrize("scene", list(oracle.EXTEND_SCENES))
def test_prompts_go_to_flash_attention(scene: str) -> None:
    """EXTEND passes through the same backend object: every site, and dead tokens are zeros."""
    for at, site in enumerate(oracle.every_site(64)):
        made = oracle.build(scene, dtype=torch.bfloat16, layout=Heads(2, 64), seed=at)
        if site.window is not None and any(row.earlier for row in made.rows):
            continue  # not in the engine: there a prompt's positions are places
        want, live = oracle.attend(made, site), int(made.batch.cu_q[-1])
        made = oracle.build(scene, dtype=torch.bfloat16, layout=Heads(2, 64), seed=at)
        made = oracle.on(made, "cuda")
        backend = TritonAttention()
        backend.plan(made.batch)
        found = PagedAttend(backend, made.pool, made.batch).heads(site, made.q, made.k, made.v)
        agrees(found, want, live)


def test_new_lengths_of_prompts_take_no_memory() -> None:
    """Nothing is kept for a length that a prompt had: 300 of them, in rows and alone."""
    layout, backend, rng = Heads(8, 128), TritonAttention(), random.Random(1)
    site = oracle.every_site(128)[0]

    def prompt() -> None:
        rows = [oracle.causal(rng.randrange(900), rng.randrange(1, 200)) for _ in range(2)]
        made = oracle.lay_out(
            rows,
            ForwardMode.EXTEND,
            dtype=torch.bfloat16,
            layout=layout,
            num_heads=32,
            page_size=16,
        )
        made = oracle.on(made, "cuda")
        backend.plan(made.batch)
        PagedAttend(backend, made.pool, made.batch).heads(site, made.q, made.k, made.v)

    for _ in range(20):
        prompt()
    before = used_memory(torch.device("cpu"))
    for _ in range(300):
        prompt()
    assert used_memory(torch.device("cpu")) < before + (64 << 20)


@pytest.mark.parametrize(
    "name",
    ["decode at borders", "ragged trees", "heads of 96", "more units than a round of joining"],
)
def test_who_joins_changes_no_bit(name: str) -> None:
    """A row's last program or the second kernel: the same units, joined in the same order."""
    case = SMALL[name]
    made = case.scene("cuda")
    last = grid.attend(made, case)
    assert torch.equal(last, grid.attend(made, dataclasses.replace(case, tiles=grid.BY_KERNEL)))


@pytest.mark.parametrize("name", list(OWN))
def test_a_replay_equals_the_eager_pass(name: str) -> None:
    """Captured once, replayed with other lengths, trees, pages and keys in the same tensors."""
    case = dataclasses.replace(OWN[name], tiles=None, dtype=torch.bfloat16)
    made = case.scene("cuda")
    site: AttnSite = case.site
    backend = TritonAttention()

    def run() -> Tensor:
        backend.plan(made.batch)
        return PagedAttend(backend, made.pool, made.batch).heads(site, made.q, made.k, made.v)

    graph, result = captured(run)
    for turn in range(4):
        batch = made.batch
        if turn:  # shorter prefixes of the same pages, fewer units, other queries
            batch.prefix_lens.sub_(batch.prefix_lens.clamp(max=7 * 9**turn // 9))
            batch.slots.fill_(-1)
            made.q.copy_(torch.randn_like(made.q))
            made.pool.k.copy_(torch.randn_like(made.pool.k))
            made.pool.v.copy_(torch.randn_like(made.pool.v))
        result.fill_(torch.nan)
        graph.replay()
        replayed = result.clone()
        assert torch.equal(replayed, run()), "replay and eager are the same kernels"
        live = int(batch.cu_q[-1])
        agrees(replayed, grid.definition(made, site), live)


def test_slots_beyond_two_to_the_31st_number() -> None:
    """A pool of some GB: offsets of keys do not fit 32 bits."""
    free, _ = torch.cuda.mem_get_info()
    if free < 24 << 30:
        pytest.skip("needs a GPU with 24 GB free")
    slots, dim = 1 << 26, 64  # 2^32 numbers
    k = torch.zeros(1, slots, dim, dtype=torch.bfloat16, device="cuda")
    v = torch.zeros_like(k)
    k[:, -64:], v[:, -64:] = torch.randn(2, 1, 64, dim, device="cuda").bfloat16()
    case = grid.Case(rows=[oracle.chain(40, 2)], num_dead=0, dtype=torch.bfloat16)
    made = case.scene("cuda")
    last = slots // 16 - 4
    made.batch.pages.copy_(torch.arange(last, last + made.batch.pages.shape[1]).clamp(max=last + 3))
    made.batch.slots.fill_(-1)
    found = _heads_over(made, k, v, case)
    near = _heads_over(
        dataclasses.replace(
            made, batch=dataclasses.replace(made.batch, pages=made.batch.pages - last)
        ),
        k[:, -64:].contiguous(),
        v[:, -64:].contiguous(),
        case,
    )
    assert torch.equal(found, near)


def _heads_over(made: oracle.Scene, k: Tensor, v: Tensor, case: grid.Case) -> Tensor:
    """The scene's queries over one layer's keys."""
    from paceline.kv.pool import KVPool

    pool = KVPool.__new__(KVPool)
    pool.k, pool.v, pool.page_size, pool.dtype = k[None], v[None], case.page_size, k.dtype
    backend = TritonAttention()
    backend.plan(made.batch)
    return backend.heads(dataclasses.replace(case.site, index=0), made.q, pool, made.batch)
