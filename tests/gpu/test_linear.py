"""Products of few rows by the Triton kernels, compiled: the definition, eager and replayed."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from paceline import ops
from paceline.ops.reference import linear as reference
from paceline.ops.triton import linear, linear_table
from paceline.ops.triton.linear_table import CAPABILITY, TABLE, Tiles
from tests import fused_grid, linear_grid, tiny
from tests.engine.test_fused import passes
from tests.gpu.test_fused import LIMITS, by_modules, on_gpu, runner_of, served
from tests.gpu_capture import captured
from tests.linear_grid import EPS, SIZES, TILES, Grid
from tests.tolerance import close, error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SUMS = 3e-5  # tensor cores cut off, rather than round, at each of some hundred additions
GRIDS = [Grid("cuda", dtype, SUMS) for dtype in (torch.bfloat16, torch.float16)]
IDS = [str(grid.dtype)[6:] for grid in GRIDS]
# Of an 8 B model: what a table is most likely to hold.
LARGE = ((4096, 4096), (4096, 12_288))
LARGE_TILES = (TILES[0], TILES[3], Tiles(block_n=128, block_k=128, split=4, num_warps=8, swap=True))
# Two tiles a size, and one size in the other type: what takes long here is compilation.
CASES = [
    (GRIDS[0], size, TILES[(at + further) % len(TILES)])
    for at, size in enumerate(SIZES)
    for further in (0, 3)
] + [(GRIDS[1], SIZES[1], tiles) for tiles in TILES]
R = TypeVar("R")


def rows_for(tiles: Tiles, *asked: int) -> list[int]:
    """Numbers of rows for which a program's blocks fit into this GPU's shared memory."""
    room = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    return [rows for rows in asked if linear_grid.shared_bytes(tiles, rows) <= room]


on_each_type = pytest.mark.parametrize("grid", GRIDS, ids=IDS)


@pytest.fixture
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", fused_grid.poison(torch.empty))


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("grid, size, tiles", CASES, ids=str)
def test_products_are_the_definition(grid: Grid, size: tuple[int, int], tiles: Tiles) -> None:
    """Parts and what is made of them, at all sizes, for one row and for most."""
    for rows in rows_for(tiles, 1, 3, 16, 33, 64, 128):
        linear_grid.products(grid, rows, size, tiles)
        linear_grid.norms(grid, rows, size, tiles)


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("tiles", LARGE_TILES, ids=str)
@pytest.mark.parametrize("size", LARGE, ids=str)
def test_sizes_of_a_large_model(size: tuple[int, int], tiles: Tiles) -> None:
    """Long sums."""
    grid = GRIDS[0]
    for rows in rows_for(tiles, 1, 16, 17, 32, 64, 100):
        linear_grid.products(grid, rows, size, tiles)
        linear_grid.norms(grid, rows, size, tiles)
    linear_grid.company(grid, size, tiles)


@pytest.mark.usefixtures("_poisoned")
@on_each_type
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_edges(grid: Grid, tiles: Tiles) -> None:
    """A row's bits do not depend on its company; NaN stays where it is."""
    linear_grid.company(grid, (136, 200), tiles)
    linear_grid.nan_stays(grid, tiles)


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("line", list(TABLE), ids=str)
def test_every_line_of_the_table(line: tuple[str, int, int]) -> None:
    """As the operator that it is for, by the table, at every number of rows that it is for."""
    if torch.cuda.get_device_capability() != CAPABILITY:
        pytest.skip(f"the table is for GPUs of compute capability {CAPABILITY}")
    name, n, k = line
    op = getattr(ops, name)
    for rows in (1, 2, 8, 16, 17, 32, 33, 64, 65, 128, 129):
        x, weight, residual, gain = GRIDS[0].inputs(rows, n, k)
        if name == "linear_add_rms_norm":
            found = op(x, weight, residual, gain, EPS)
            want = getattr(reference, name)(x, weight, residual, gain, EPS)
        else:
            found, want = (op(x, weight),), (getattr(reference, name)(x, weight),)
        for one, other in zip(found, want, strict=True):
            assert one.dtype == other.dtype
            assert close(one, other, SUMS if one.dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("tiles", [TILES[0], TILES[3]], ids=str)
def test_weights_beyond_two_to_the_31st_number(tiles: Tiles) -> None:
    """A vocabulary of some GB: offsets of rows do not fit 32 bits."""
    free, _ = torch.cuda.mem_get_info()
    if free < 12 << 30:
        pytest.skip("needs a GPU with 12 GB free")
    n, k = (1 << 20) + 3, 2112
    weight = torch.zeros(n, k, dtype=torch.bfloat16, device="cuda")
    ends = [0, n // 2, n - 1]
    weight[ends] = GRIDS[0].normal(3, k)
    x = GRIDS[0].normal(2, k, seed=1)
    found = linear.parts(x, weight, tiles, torch.float32).sum(0)
    assert close(found[:, ends], x.double() @ weight[ends].double().T, SUMS)
    found[:, ends] = 0
    assert not found.any(), "elsewhere nothing"


@on_each_type
@pytest.mark.parametrize("rows", [1, 16, 48])
def test_replays_equal_the_eager_calls(
    grid: Grid, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers' worth, by the operators; with other numbers, and other graphs run in between."""
    tiles = Tiles(block_n=64, block_k=128, split=4)
    lines = {("linear_add_rms_norm", 576, 576): dict.fromkeys(linear_table.BLOCKS, tiles)}
    monkeypatch.setattr(linear_table, "TABLE", lines)
    monkeypatch.setattr(linear, "_measured", lambda _: True)
    launches: list[int] = []
    by_kernel = linear.parts

    def parts(x: Tensor, weight: Tensor, tiles: Tiles, dtype: torch.dtype) -> Tensor:
        launches.append(x.shape[0])
        return by_kernel(x, weight, tiles, dtype)

    monkeypatch.setattr(linear, "parts", parts)
    x, weight, residual, gain = grid.inputs(rows, 576, 576)

    def run() -> tuple[Tensor, ...]:
        first = ops.linear_add_rms_norm(x, weight, residual, gain, EPS)
        return *first, *ops.linear_add_rms_norm(first[0], weight, first[1], gain, EPS)

    graph, results = captured(run)
    other, _ = captured(run)
    assert launches == [rows] * 12, "twice in each of three runs of two graphs"
    for turn in range(3):
        if turn:
            x.normal_()
            residual.normal_()
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        replayed = [result.clone() for result in results]
        other.replay()
        for found, again, want in zip(replayed, results, run(), strict=True):
            assert torch.equal(found, want)
            assert torch.equal(again, want), "another graph has memory of its own"


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_a_pass_by_own_products_is_what_the_modules_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Hidden states, taps and the pool; with biases, which are the library's."""
    taps = (1, 0)
    net, pools = served(tiny.write_tiny(tmp_path, architecture, head_dim=64), torch.bfloat16)
    runner = runner_of(net, pools[0], taps)
    batch = on_gpu(passes()["verify"])
    want = by_modules(net, pools[1], batch, taps)
    launched: list[str] = []

    def tiles_for(op: str, rows: int, *_: int) -> Tiles | None:
        launched.append(op)
        split = 2 if op == "linear_add_rms_norm" else 1
        return Tiles(block_n=32, block_k=32, split=split) if rows <= 64 else None

    monkeypatch.setattr(linear, "tiles_for", tiles_for)
    monkeypatch.setattr(linear, "_measured", lambda _: True)
    found = runner.forward(batch)
    assert launched.count("linear_add_rms_norm") == 2 * len(net.decoder().layers)
    live = int(batch.cu_q[-1])
    assert found.aux is not None
    assert want.aux is not None
    for a, b in ((found.hidden, want.hidden), (found.aux, want.aux)):
        assert error(a[:live], b[:live]) <= LIMITS[torch.bfloat16]
    for a, b in ((pools[0].k, pools[1].k), (pools[0].v, pools[1].v)):
        assert error(a[:, :, :-1], b[:, :, :-1]) <= LIMITS[torch.bfloat16]
