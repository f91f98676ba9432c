"""The fused Triton kernels, compiled, and the pass made of them: the definition, eager and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from paceline import models, ops
from paceline.attention import choose
from paceline.attention.base import PagedAttend
from paceline.core.batch import ForwardBatch, ForwardOutput
from paceline.engine.fused_ops import OpsPass
from paceline.engine.runner import ModelRunner
from paceline.kv.layout import Heads
from paceline.kv.pool import KVPool
from paceline.ops.dispatch import explain
from paceline.ops.triton import fused
from tests import fused_grid, tiny
from tests.fused_grid import SHAPES, WIDTHS, Grid, Shape
from tests.gpu_capture import captured
from tests.tolerance import error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GRIDS = [Grid("cuda", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
IDS = [str(grid.dtype)[6:] for grid in GRIDS]
TOKENS = [1, 3, 8, 64, 515]
# Every one in bfloat16, some in the other types: what takes long here is compilation.
ROWS = [
    (grid, width)
    for grid in GRIDS
    for width in (*WIDTHS, 12_288)
    if grid.dtype == torch.bfloat16 or width in (17, 576, 4096)
]
HEADS = [
    (grid, shape)
    for grid in GRIDS
    for shape in (*SHAPES, Shape(17, 9, 16))
    if grid.dtype == torch.bfloat16 or shape in SHAPES[1:3]
]
PAGE = 4
R = TypeVar("R")

on_each_type = pytest.mark.parametrize("grid", GRIDS, ids=IDS)


@pytest.fixture
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", fused_grid.poison(torch.empty))


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("grid, width", ROWS, ids=str)
def test_rows_are_the_definition(grid: Grid, width: int, tokens: int) -> None:
    """Norms and gates of all widths, in memory of all kinds."""
    fused_grid.norms(grid, tokens, width)
    fused_grid.added_norms(grid, tokens, width)
    fused_grid.gates(grid, tokens, width)


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("grid, shape", HEADS, ids=str)
def test_heads_are_the_definition(grid: Grid, shape: Shape, tokens: int) -> None:
    """Rotations and cache writes, one by one and fused, with norms and without."""
    fused_grid.rotations(grid, tokens, shape)
    fused_grid.writes(grid, tokens, shape)
    for normed in (False, True):
        fused_grid.projections(grid, tokens, shape, normed=normed)


@on_each_type
@pytest.mark.usefixtures("_poisoned")
def test_thousands_of_tokens(grid: Grid) -> None:
    """A chunk of a prompt."""
    fused_grid.added_norms(grid, 4099, 576)
    fused_grid.gates(grid, 4099, 1536)
    fused_grid.projections(grid, 4099, SHAPES[0], normed=True)


@on_each_type
@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize(
    "check", [fused_grid.nothing, fused_grid.nan_stays, fused_grid.out_of_the_ordinary]
)
def test_edges(grid: Grid, check: Callable[[Grid], None]) -> None:
    """Nothing to do, NaN, and what the kernels leave to the reference."""
    check(grid)


@on_each_type
def test_rows_have_the_same_bits_in_any_company(grid: Grid) -> None:
    """How many rows there are decides nothing."""
    fused_grid.company(grid, 300)


@on_each_type
def test_a_cache_of_another_type(grid: Grid) -> None:
    """Both ways to write it agree."""
    for shape in SHAPES:
        fused_grid.another_type(grid, shape)


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "rope_write", "silu_mul", "kv_write"])
def test_a_gpu_uses_them(op: str) -> None:
    """On this GPU, with this Triton."""
    assert next(c.name for c in explain(op, "cuda", torch.bfloat16) if c.chosen) == "triton"


@on_each_type
@pytest.mark.parametrize("tokens", [1, 48])
def test_a_replay_equals_the_eager_calls(grid: Grid, tokens: int) -> None:
    """Captured once, replayed with other numbers, positions and slots in the same tensors."""
    shape = SHAPES[1]
    x, stream = grid.normal(tokens, 576), grid.normal(tokens, 576, seed=1)
    weight, table = grid.normal(576, seed=2), fused_grid.angles(grid, shape.dim)
    gains = (weight[: shape.dim], weight[shape.dim : 2 * shape.dim])
    qkv = grid.normal(tokens, (shape.q_heads + 2 * shape.kv_heads) * shape.dim)
    positions, slots = fused_grid.places(grid, tokens)
    made = fused_grid.cache(grid, tokens, shape)

    def run() -> tuple[Tensor, ...]:
        k, v = made.layer
        first = fused.rms_norm(x, weight, fused_grid.EPS)
        normed, after = fused.add_rms_norm(first, stream, weight, fused_grid.EPS)
        q = fused.rope_write(qkv, positions, table, slots, k, v, gains, fused_grid.EPS)
        return normed, after, fused.silu_mul(normed), q

    graph, results = captured(run)
    for turn in range(3):
        if turn:
            x.normal_()
            qkv.normal_()
            positions.copy_(fused_grid.NUM_POSITIONS - 1 - positions)
            slots.copy_(torch.where(slots < 0, -1, (slots + 1) % (fused_grid.NUM_SLOTS - 1)))
        made.pool.fill_(torch.nan)
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        replayed = [result.clone() for result in results]
        written = made.pool.clone()
        made.pool.fill_(torch.nan)
        for found, want in zip(replayed, run(), strict=True):
            assert torch.equal(found, want)
        assert torch.equal(written.nan_to_num(7.0), made.pool.nan_to_num(7.0))
        live = slots[slots >= 0]
        assert written[:, 1][:, :, live].isfinite().all()


@pytest.mark.parametrize("way", ["kv_write", "rope_write"])
@pytest.mark.parametrize("kv_heads, num_slots", [(1, 1 << 26), (8, 1 << 23)])
def test_places_beyond_two_to_the_31st_number(kv_heads: int, num_slots: int, way: str) -> None:
    """A pool of some GB: offsets of slots and of heads do not fit 32 bits."""
    free, _ = torch.cuda.mem_get_info()
    if free < 24 << 30:
        pytest.skip("needs a GPU with 24 GB free")
    grid, dim = GRIDS[0], 64
    caches = torch.zeros(2, kv_heads, num_slots, dim, dtype=grid.dtype, device="cuda")
    qkv = grid.normal(2, 3 * kv_heads * dim)
    k, v = (x.unflatten(1, (kv_heads, dim)) for x in qkv.chunk(3, 1)[1:])
    slots = torch.tensor([num_slots - 2, num_slots // 2 + 5], device="cuda")
    if way == "kv_write":
        fused.kv_write(caches[0], caches[1], slots, k, v)
    else:
        table = torch.ones(1, dim, device="cuda")
        table[:, dim // 2 :] = 0  # turned by nothing
        fused.rope_write(qkv, slots * 0, table, slots, caches[0], caches[1], None, 1e-6)
    for cache, want in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[:, slots].transpose(0, 1), want)
        cache[:, slots] = 0
    assert not caches.any(), "elsewhere nothing"


# ------------------------------------------------------------------------------------------ passes


def on_gpu(batch: ForwardBatch) -> ForwardBatch:
    named = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{k: v.cuda() for k, v in named.items() if isinstance(v, Tensor)})


def served(folder: Path, dtype: torch.dtype) -> tuple[models.CausalLM, list[KVPool]]:
    """A tiny network on the GPU and two pools with the same random content."""
    cuda = torch.device("cuda")
    loaded = models.load(models.resolve(str(folder)), device=cuda, dtype=dtype, weights="bf16")
    layout = Heads(loaded.config.num_kv_heads, loaded.config.head_dim)
    pools = [KVPool(layout, loaded.config.num_layers, 20, PAGE, dtype, cuda) for _ in range(2)]
    pools[0].k.normal_()
    pools[0].v.normal_()
    pools[1].k.copy_(pools[0].k)
    pools[1].v.copy_(pools[0].v)
    return loaded.net, pools


def by_modules(
    net: models.CausalLM, pool: KVPool, batch: ForwardBatch, taps: tuple[int, ...]
) -> ForwardOutput:
    backend, _ = choose(pool.layout, pool.device, pool.dtype, PAGE)
    backend.plan(batch)
    with torch.inference_mode():
        return net(batch, PagedAttend(backend, pool, batch), taps)


def runner_of(net: models.CausalLM, pool: KVPool, taps: tuple[int, ...]) -> ModelRunner:
    backend, _ = choose(pool.layout, pool.device, pool.dtype, PAGE)
    runner = ModelRunner(net, pool, backend, aux_layers=taps)
    assert isinstance(runner._fused, OpsPass)
    return runner


LIMITS = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_pass_is_what_the_modules_give(
    tmp_path: Path, architecture: str, dtype: torch.dtype
) -> None:
    """Trees and prompts, taps, the pool; biases and norms of heads; every type."""
    from tests.engine.test_fused import passes

    taps = (1, 0)
    net, pools = served(tiny.write_tiny(tmp_path, architecture, head_dim=64), dtype)
    runner = runner_of(net, pools[0], taps)
    for batch in map(on_gpu, passes().values()):
        found, want = runner.forward(batch), by_modules(net, pools[1], batch, taps)
        live = int(batch.cu_q[-1])
        assert found.aux is not None
        assert want.aux is not None
        for a, b in ((found.hidden, want.hidden), (found.aux, want.aux)):
            assert a.dtype == dtype
            assert error(a[:live], b[:live]) <= LIMITS[dtype]
        for a, b in ((pools[0].k, pools[1].k), (pools[0].v, pools[1].v)):
            assert error(a[:, :, :-1], b[:, :, :-1]) <= LIMITS[dtype]


def test_a_replayed_pass_equals_the_eager_one(tmp_path: Path) -> None:
    """A verify step's pass, captured and replayed with other tokens, places and trees."""
    from tests.engine.test_fused import passes

    net, pools = served(tiny.write_tiny(tmp_path, "qwen3", head_dim=64), torch.bfloat16)
    runner = runner_of(net, pools[0], (0,))
    batch = on_gpu(passes()["verify"])
    with torch.inference_mode():
        graph, out = captured(lambda: runner.forward(batch))
        assert out.aux is not None
        for turn in range(3):
            batch.token_ids.copy_((batch.token_ids + 3 * turn) % 90)
            batch.positions.add_(turn)
            out.hidden.fill_(torch.nan)
            out.aux.fill_(torch.nan)
            graph.replay()
            replayed = out.hidden.clone(), out.aux.clone(), pools[0].k.clone()
            again = runner.forward(batch)
            assert again.aux is not None
            live = int(batch.cu_q[-1])
            for a, b in zip(replayed[:2], (again.hidden, again.aux), strict=True):
                assert error(a[:live], b[:live]) <= LIMITS[torch.bfloat16]
            assert error(replayed[2][:, :, :-1], pools[0].k[:, :, :-1]) <= LIMITS[torch.bfloat16]


def test_the_ops_of_a_gpu_take_gradients() -> None:
    """Training uses the same modules: gradients flow where somebody wants them."""
    x = torch.randn(4, 64, device="cuda", requires_grad=True)
    weight = torch.ones(64, device="cuda", requires_grad=True)
    (ops.rms_norm(x, weight, 1e-5).sum() + ops.silu_mul(x).sum()).backward()
    assert x.grad is not None
    assert weight.grad is not None
