"""Finds the fastest tiles of the attention kernels for twelve shapes: `gpu_attention.py --sweep`.

A model of 32 query and 8 key/value heads of 128 numbers: 1, 8 and 64 rows of about 1,024 keys and one
of 32,768, with 1 to 32 queries. What is found goes into the table of `ops/triton/grid.py`, by hand.

Each candidate runs over layers that together are larger than the second-level cache, many times in one
CUDA graph, with a page table twice as wide as the rows are, as in service. Its result is compared
with SDPA's before it is timed. All are compiled first, by as many processes as there are processors.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import torch
from gpu_attention import CUDA, PAGE, Shape, Step, make_pool, moved

from paceline.bench.machine import Json
from paceline.ops.triton.attention import attend
from paceline.ops.triton.grid import Tiles, WorkSpace, shape

PEAK = 4.24e12  # bytes a second that a copy of gigabytes read on an H200
CACHED = 192 << 20  # bytes of which nothing is left in a cache when they have been read
REPEATS = 5
CHECKED = 1e-2  # most relative error against SDPA


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Rows of so many keys, each with so many queries."""

    rows: int
    keys: int
    nodes: int

    @property
    def shape(self) -> Shape:
        """The model's shape, with as many layers as defeat the cache."""
        layer = self.rows * self.keys * 8 * 128 * 2 * 2
        layers = max(3, -(-CACHED // layer))
        return Shape(
            name=f"{self.rows} x {self.keys}",
            rows=self.rows,
            context=self.keys,
            q_heads=32,
            kv_heads=8,
            dim=128,
            layers=layers,
        )

    @property
    def packed(self) -> int:
        """Packed queries of a row."""
        return self.nodes * 4

    @property
    def num_keys(self) -> int:
        """What the page table holds."""
        return 2 * -(-(self.keys + self.nodes) // PAGE) * PAGE


POINTS = tuple(
    Point(rows=rows, keys=keys, nodes=nodes)
    for rows, keys, several in (
        (1, 1024, (1, 16, 32)),
        (8, 1024, (1, 8, 16)),
        (64, 1024, (1, 8, 16)),
        (1, 32_768, (1, 8, 32)),
    )
    for nodes in several
)
# Keys at once, warps, stages: by packed queries of a program.
WAYS = {
    16: ((64, 4, 3), (64, 4, 2), (64, 4, 4), (32, 4, 4), (128, 4, 2), (128, 8, 2), (64, 2, 3)),
    32: ((64, 4, 3), (64, 4, 2), (64, 4, 4), (32, 4, 4), (128, 4, 2), (128, 8, 2), (64, 2, 3)),
    64: ((64, 4, 3), (64, 4, 2), (64, 8, 3), (128, 4, 2), (128, 8, 2), (128, 8, 3), (32, 4, 4)),
    128: ((64, 8, 3), (64, 8, 2), (64, 8, 4), (128, 8, 2), (32, 8, 4)),
}


def candidates(point: Point) -> Iterator[Tiles]:
    """Tiles worth a try, the likeliest first."""
    if point.rows == 64:
        units, joins = (4096, 512, 1024), (True,)
    elif point.rows == 8:
        units, joins = (256, 128, 512, 4096), (True,)
    elif point.keys < 4096:
        units, joins = (128, 64, 256), (True,)
    else:
        units, joins = (512, 1024, 256), (True,) if point.nodes == 1 else (False, True)
    most = min(block for block in WAYS if block >= min(point.packed, 128))
    blocks = [block for block in WAYS if most // (8 if point.rows == 1 else 2) <= block <= most]
    for unit, last, block_m in itertools.product(units, joins, blocks):
        for block_n, warps, stages in WAYS[block_m]:
            if block_n <= unit:
                yield Tiles(
                    block_m=block_m,
                    block_n=block_n,
                    unit=unit,
                    num_warps=warps,
                    num_stages=stages,
                    last_joins=last,
                )


def variants() -> list[tuple[Point, Tiles]]:
    """One candidate for each program that the compiler makes."""
    found: dict[object, tuple[Point, Tiles]] = {}
    for point in POINTS:
        for tiles in candidates(point):
            planned = _planned(point, tiles)
            ways = (tiles.block_m, tiles.block_n, tiles.num_warps, tiles.num_stages)
            joins = (planned.last_joins, planned.units <= 4, min(point.packed, 16))
            key = (*ways, point.nodes > 1, *(joins if planned.last_joins else ()))
            found.setdefault(key, (point, tiles))
    return list(found.values())


def _planned(point: Point, tiles: Tiles | None):  # noqa: ANN202 (the kernels' Shape, not ours)
    return shape(
        num_rows=point.rows,
        q_len=point.nodes,
        num_keys=point.num_keys,
        q_heads=32,
        kv_heads=8,
        dim=128,
        tiles=tiles,
    )


def build(wanted: tuple[Point, Tiles]) -> str:
    """Compile what a candidate launches, by a pass without queries; why it failed, or nothing."""
    point, tiles = wanted
    tokens, width = point.rows * point.nodes, point.num_keys // PAGE
    try:
        zeros = torch.zeros(point.rows + 1, dtype=torch.int64, device=CUDA)
        keys = torch.zeros(8, 4 * PAGE, 128, dtype=torch.bfloat16, device=CUDA)
        attend(
            keys.new_zeros(tokens, 32, 128),
            keys,
            keys,
            planned=_planned(point, tiles),
            work=WorkSpace(),
            pages=torch.zeros(point.rows, width, dtype=torch.int32, device=CUDA),
            prefix_lens=zeros[1:],
            tail_lens=zeros[1:],
            cu_q=zeros,
            positions=zeros.new_zeros(tokens),
            mask=zeros.new_zeros(tokens, 1) if point.nodes > 1 else None,
            page_size=PAGE,
            scale=1.0,
            window=None,
            causal=False,
        )
    except Exception as error:  # noqa: BLE001 (too many resources, whatever its class)
        return type(error).__name__
    return ""


def build_all() -> None:
    """Compile everything, in as many processes as there are processors."""
    wanted, started = variants(), time.perf_counter()
    try:
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
            failures = [why for why in pool.map(build, wanted) if why]
    except BrokenProcessPool as error:  # what is missing is compiled when it is measured
        failures = [str(error)]
    took = time.perf_counter() - started
    print(
        f"{len(wanted)} variants compiled in {took:.0f} s; failed: {failures or 'none'}", flush=True
    )


def measure(point: Point, deadline: float) -> dict[str, Json]:
    """All candidates of a point, fastest first; what is served now is one of them."""
    model = point.shape
    pool, pages = make_pool(model, point.nodes)
    step = Step(model, point.nodes, pool, pages)
    passes = max(1, 32 // model.layers)
    lines: list[dict[str, Json]] = []
    tried = [None, *candidates(point)]
    for tiles in tried:
        if lines and time.perf_counter() > deadline:
            break
        try:
            took = step.triton(REPEATS, tiles, passes) / (passes * model.layers)
        except (RuntimeError, ValueError, SystemExit) as error:  # too many resources, or wrong
            print(f"  {tiles}: {type(error).__name__}: {str(error)[:80]}", flush=True)
            continue
        except Exception as error:  # noqa: BLE001 (Triton's own classes)
            print(f"  {tiles}: {type(error).__name__}", flush=True)
            continue
        planned = _planned(point, tiles)
        lines.append(
            {
                **asdict(planned.tiles),
                "last_joins": planned.last_joins,
                "units": planned.units,
                "served": tiles is None,
                "layer_us": took * 1e6,
                "share": moved(model, point.nodes) / took / PEAK,
            }
        )
    lines.sort(key=lambda line: float(str(line["layer_us"])))
    report(point, lines, len(tried))
    return {**asdict(point), "tried": len(lines), "of": len(tried), "lines": list(lines)}


def report(point: Point, lines: list[dict[str, Json]], num_candidates: int) -> None:
    """Print the best five and what is served."""
    print(f"{point.rows} x {point.keys}, {point.nodes} queries: {len(lines)} of {num_candidates}")
    print("       us  share  block_m  block_n   unit  warps  stages  joined by")
    for line in [*lines[:5], *(line for line in lines[5:] if line["served"])]:
        joined = "last" if line["last_joins"] else "kernel" if line["units"] != 1 else "-"
        print(
            f"  {line['layer_us']:7.2f} {line['share']:6.1%} {line['block_m']:8} {line['block_n']:8}"
            f" {line['unit']:6} {line['num_warps']:6} {line['num_stages']:7}  {joined}"
            f"{'  (served)' if line['served'] else ''}",
            flush=True,
        )


def run(budget: float) -> list[Json]:
    """Measure all points within about `budget` seconds, compilation included."""
    started = time.perf_counter()
    build_all()
    gc.freeze()  # each capture collects garbage, which would take longer than what is measured
    found: list[Json] = []
    for i, point in enumerate(POINTS):
        left = started + budget - time.perf_counter()
        found.append(measure(point, time.perf_counter() + left / (len(POINTS) - i)))
        torch.cuda.empty_cache()
    print(f"all of it took {time.perf_counter() - started:.0f} s", flush=True)
    return found
