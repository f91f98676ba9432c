"""Finds the fastest tiles of the attention kernels: `gpu_attention.py --sweep`.

Passes of a model of 32 query and 8 key/value heads of 128 numbers, from one row and one query to 64
rows and one long one, and of a small model. What is found goes into the table of `ops/triton/grid.py`,
by hand. Each point has a list of candidates, the likeliest first; points take turns, so that each
has had its likeliest when the time is up.

A candidate runs over layers that together are larger than the second-level cache, many times in one
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
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context

import torch
from gpu_attention import CUDA, PAGE, RAGGED, Nodes, Shape, Step, make_pool, moved

from paceline.bench.machine import Json
from paceline.ops.triton.attention import attend, joined_at_once
from paceline.ops.triton.grid import Shape as Planned
from paceline.ops.triton.grid import Tiles, WorkSpace, shape

CACHED = 192 << 20  # bytes of which nothing is left in a cache when they have been read
REPEATS = 5

# Keys at once, warps, stages.
NARROW = ((64, 4, 3), (64, 2, 3), (32, 4, 4), (32, 2, 4), (128, 4, 2), (32, 1, 4), (64, 4, 4))
MIDDLE = ((64, 4, 3), (64, 2, 3), (32, 4, 4), (64, 4, 4))
WIDE = ((64, 8, 3), (64, 4, 3), (32, 4, 4), (64, 8, 2), (32, 8, 4), (64, 8, 4))
DEEP = ((64, 4, 3), (32, 4, 4), (64, 4, 4), (64, 4, 6), (32, 4, 6), (128, 8, 2))
WIDEST = ((64, 8, 3), (64, 8, 2), (128, 8, 2), (64, 8, 5))
ALL = 4096  # a unit that holds a row
Way = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """How rows are cut: lengths of units, half of which a last one has to have; who joins them."""

    lengths: tuple[int, ...]
    halves: tuple[bool, ...] = (True, False)
    joins: tuple[bool, ...] = (True,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A pass, and what is tried: by packed queries of a program, ways to work."""

    rows: int
    keys: int
    nodes: Nodes
    units: Units
    ways: dict[int, tuple[Way, ...]] = field(compare=False)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads and their size: of a model of 8 B, or of one of 0.1 B."""
        return (9, 3, 64) if self.rows > 64 else (32, 8, 128)

    @property
    def shape(self) -> Shape:
        """The model's shape, with as many layers as defeat the cache."""
        q_heads, kv_heads, dim = self.heads
        layer = self.rows * self.keys * kv_heads * dim * 2 * 2
        return Shape(
            name=f"{self.rows} x {self.keys}",
            rows=self.rows,
            context=self.keys,
            q_heads=q_heads,
            kv_heads=kv_heads,
            dim=dim,
            layers=max(3, -(-CACHED // layer)),
        )

    @property
    def most(self) -> int:
        """Queries of the row that has most."""
        return max(self.nodes.counts)

    @property
    def num_keys(self) -> int:
        """What the page table holds."""
        return 2 * -(-(self.keys + self.most) // PAGE) * PAGE


def _point(
    rows: int, keys: int, nodes: int | Nodes, units: Units, **ways: tuple[Way, ...]
) -> Point:
    nodes = Nodes((nodes,)) if isinstance(nodes, int) else nodes
    packed = {int(name.removeprefix("m")): several for name, several in ways.items()}
    return Point(rows=rows, keys=keys, nodes=nodes, units=units, ways=packed)


_FEW = Units(lengths=(256, 512, 320), joins=(True, False))
_LONG = Units(lengths=(1024, 2048, 512), halves=(True,), joins=(False, True))
_ONE = Units(lengths=(128, 256, 64))
_MANY = Units(lengths=(ALL, 1024, 512), halves=(True,))
_SMALL = Units(lengths=(ALL, 256), halves=(True,))
_BLOCK = Nodes((16,), block=True)
_NARROWER = {"m16": ((64, 4, 3), (128, 4, 2), (64, 2, 3))}
_FORKS = {"m64": ((64, 4, 3), (32, 4, 4), (64, 4, 2)), **_NARROWER}

POINTS = (
    _point(8, 1024, 16, _FEW, m64=WIDE, m32=((64, 4, 3),)),
    _point(8, 1024, 16, Units(lengths=(ALL,), halves=(True,)), m64=DEEP),
    _point(1, 32_768, 32, _LONG, m128=WIDEST, m64=((64, 4, 3),)),
    _point(1, 32_768, 8, _LONG, m64=((64, 4, 3), (32, 4, 4), (64, 4, 2)), m32=MIDDLE[:3]),
    _point(1, 32_768, 1, _LONG, m16=NARROW, m64=((64, 4, 3), (32, 4, 4))),
    _point(8, 1024, 8, _FEW, m64=((64, 4, 3), (32, 4, 4), (64, 8, 3)), m32=MIDDLE[:2]),
    _point(8, 1024, 1, _FEW, m16=NARROW, m64=((64, 4, 3), (32, 4, 4))),
    _point(8, 1024, 32, _FEW, m128=WIDEST[:3], m64=((64, 4, 3), (32, 4, 4))),
    _point(64, 1024, 8, _MANY, m64=((64, 4, 3), (32, 4, 4), (32, 4, 6)), m32=MIDDLE),
    _point(64, 1024, 32, _MANY, m128=WIDEST, m64=((64, 4, 3), (32, 4, 4))),
    _point(16, 1024, 8, Units(lengths=(512, ALL, 256), halves=(True,)), m64=WIDE[:3]),
    _point(
        16, 1024, 1, Units(lengths=(512, 256, ALL), halves=(True,)), m16=NARROW[:4], m64=WIDE[1:3]
    ),
    _point(64, 1024, 16, _MANY, m64=((64, 4, 3), (32, 4, 4), (32, 4, 6), (64, 4, 2))),
    _point(64, 1024, 1, _MANY, m16=NARROW, m64=((64, 4, 3), (32, 4, 4))),
    _point(64, 1024, 4, _MANY, m16=NARROW, m64=((64, 4, 3), (32, 4, 4))),
    _point(64, 1024, RAGGED, _MANY, m64=((64, 4, 3), (32, 4, 4), (32, 4, 6)), m16=NARROW[:3]),
    _point(1, 1024, 16, _ONE, **_FORKS, m32=((64, 4, 3),)),
    _point(1, 1024, 32, _ONE, **_FORKS, m128=((64, 8, 2), (32, 8, 3))),
    _point(1, 1024, 1, _ONE, m16=NARROW, m64=((64, 4, 2), (32, 4, 3))),
    _point(1, 1024, _BLOCK, _ONE, **_FORKS),
    _point(4, 1024, 16, Units(lengths=(128, 256, 320), halves=(True,)), m64=WIDE, **_NARROWER),
    _point(16, 1024, 16, Units(lengths=(512, ALL), halves=(True,)), m64=WIDE),
    _point(8, 4096, 16, Units(lengths=(1024, 2048, 512), halves=(True,)), m64=WIDE[:4]),
    _point(32, 1024, _BLOCK, Units(lengths=(ALL, 512, 256), halves=(True,)), m64=DEEP),
    _point(64, 1024, _BLOCK, _MANY, m64=WIDE[:4]),
    _point(1024, 400, 1, _SMALL, m16=NARROW),
    _point(1024, 400, 8, _SMALL, m32=(*MIDDLE, (128, 4, 2)), m64=((64, 4, 3), (128, 4, 3))),
    _point(1024, 400, 32, _SMALL, m128=(*WIDEST[:3], (64, 4, 3)), m64=((64, 4, 3), (128, 4, 2))),
)


def candidates(point: Point) -> Iterator[Tiles]:
    """Tiles worth a try, the likeliest first."""
    cuts = [
        (unit, unit // 2 if half else 1, last)
        for last, unit, half in itertools.product(
            point.units.joins, point.units.lengths, point.units.halves
        )
    ]
    seconds = {size: ways[1:] for size, ways in point.ways.items()}
    firsts = {size: ways[:1] for size, ways in point.ways.items()}
    # The first way with every cut, then the other ways with the first cuts, then the rest.
    for chosen, ways in (
        (cuts[:3], firsts),
        (cuts[:2], seconds),
        (cuts[3:], firsts),
        (cuts[2:4], seconds),
    ):
        for size, several in ways.items():
            for (unit, least, last), (block_n, warps, stages) in itertools.product(chosen, several):
                if unit % block_n == 0:
                    yield Tiles(
                        block_m=size,
                        block_n=block_n,
                        unit=unit,
                        least=least,
                        num_warps=warps,
                        num_stages=stages,
                        last_joins=last,
                    )


def variants() -> list[tuple[Point, Tiles | None]]:
    """One candidate for each program that the compiler makes."""
    found: dict[object, tuple[Point, Tiles | None]] = {}
    for point in POINTS:
        for tiles in (None, *candidates(point)):
            planned = _planned(point, tiles)
            used = planned.tiles
            ways = (used.block_m, used.block_n, used.num_warps, used.num_stages)
            joins = joined_at_once(planned) if planned.last_joins else planned.units > 1
            key = (*ways, point.most > 1, point.heads, joins)
            found.setdefault(key, (point, tiles))
    return list(found.values())


def _planned(point: Point, tiles: Tiles | None) -> Planned:
    q_heads, kv_heads, dim = point.heads
    return shape(
        num_rows=point.rows,
        q_len=point.most,
        num_keys=point.num_keys,
        q_heads=q_heads,
        kv_heads=kv_heads,
        dim=dim,
        tiles=tiles,
    )


def build(wanted: tuple[Point, Tiles | None], device: torch.device = CUDA) -> str:
    """Compile what a candidate launches, by a pass without queries; why it failed, or nothing."""
    point, tiles = wanted
    q_heads, kv_heads, dim = point.heads
    tokens, width = point.rows * point.most, point.num_keys // PAGE
    try:
        zeros = torch.zeros(point.rows + 1, dtype=torch.int64, device=device)
        keys = torch.zeros(kv_heads, 4 * PAGE, dim, dtype=torch.bfloat16, device=device)
        attend(
            keys.new_zeros(tokens, q_heads, dim),
            keys,
            keys,
            planned=_planned(point, tiles),
            work=WorkSpace(),
            pages=torch.zeros(point.rows, width, dtype=torch.int32, device=device),
            prefix_lens=zeros[1:],
            tail_lens=zeros[1:],
            cu_q=zeros,
            positions=zeros.new_zeros(tokens),
            mask=zeros.new_zeros(tokens, 1) if point.most > 1 else None,
            page_size=PAGE,
            scale=1.0,
            window=None,
            causal=False,
        )
    except Exception as error:  # noqa: BLE001 (too many resources, whatever its class)
        return f"{type(error).__name__} {tiles}"
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


class Bench:
    """A point's memory, and the candidates that are still to be measured."""

    def __init__(self, point: Point, peak: float) -> None:
        self.point = point
        self.model = point.shape
        pool, pages = make_pool(self.model, point.most)
        self.step = Step(self.model, point.nodes, pool, pages)
        self.passes = max(1, 32 // self.model.layers)
        self.waiting: list[Tiles | None] = [None, *candidates(point)]
        self.lines: list[dict[str, Json]] = []
        self.best_possible = moved(self.model, point.nodes) / peak

    def measure_next(self) -> None:
        """Time the next candidate; one that does not run is said and passed over."""
        tiles = self.waiting.pop(0)
        try:
            took = self.step.triton(REPEATS, tiles, self.passes) / (self.passes * self.model.layers)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (too many resources, or wrong)
            print(f"  {tiles}: {type(error).__name__}: {str(error)[:80]}", flush=True)
            return
        planned = _planned(self.point, tiles)
        self.lines.append(
            {
                **asdict(planned.tiles),
                "last_joins": planned.last_joins,
                "units": planned.units,
                "served": tiles is None,
                "layer_us": took * 1e6,
                "share": self.best_possible / took,
            }
        )

    def record(self) -> dict[str, Json]:
        """What was found, fastest first."""
        self.lines.sort(key=lambda line: float(str(line["layer_us"])))
        point = self.point
        return {
            "rows": point.rows,
            "keys": point.keys,
            "heads": list(point.heads),
            "nodes": point.nodes.name,
            "tried": len(self.lines),
            "left": len(self.waiting),
            "lines": list(self.lines),
        }

    def report(self) -> None:
        """Print the best five and what is served."""
        point = self.point
        print(
            f"{point.rows} x {point.keys}, {point.nodes.name} queries, heads {point.heads}: "
            f"{len(self.lines)} tried, {len(self.waiting)} left"
        )
        print("       us  share  block_m  block_n   unit  least  warps  stages  joined by")
        for line in [*self.lines[:5], *(line for line in self.lines[5:] if line["served"])]:
            joined = "last" if line["last_joins"] else "kernel" if line["units"] != 1 else "-"
            print(
                f"  {line['layer_us']:7.2f} {line['share']:6.1%} {line['block_m']:8}"
                f" {line['block_n']:8} {line['unit']:6} {line['least']:6} {line['num_warps']:6}"
                f" {line['num_stages']:7}  {joined}{'  (served)' if line['served'] else ''}",
                flush=True,
            )


def run(budget: float, peak: float) -> list[Json]:
    """Measure for about `budget` seconds, compilation included.

    Args:
        budget: seconds.
        peak: bytes a second that memory was measured to give.
    """
    started = time.perf_counter()
    build_all()
    gc.freeze()  # each capture collects garbage, which would take longer than what is measured
    benches = [Bench(point, peak) for point in POINTS]
    while any(bench.waiting for bench in benches):
        for bench in benches:
            if bench.waiting and time.perf_counter() - started < budget:
                bench.measure_next()
        if time.perf_counter() - started > budget:
            break
    found: list[Json] = [bench.record() for bench in benches]
    for bench in benches:
        bench.report()
    print(f"all of it took {time.perf_counter() - started:.0f} s", flush=True)
    return found
