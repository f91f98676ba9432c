"""Measures products of few rows on a GPU: the library's against Triton's, and sweeps over tiles.

What it answers: microseconds of the products of a Qwen3-8B layer and of its head, with what follows
folded in where an operator does that (`linear_add_rms_norm`), for passes of 1 to 128 rows; which tiles
are the fastest; and which share of the rate at which this memory can be read each reaches.

Each operator is captured many times in one graph, over enough copies of its weights that none is in
a cache when its turn comes again; replays are timed by events, and medians taken. So a call's time has
the pause between kernels in it, as in a captured decode step. Tiles are compared with the product in
float32 before they are timed; wrong ones fail the run, at its end. The sweep takes a minute at most
(`--sweep` seconds), better guesses first, and says how many tiles it got to.

    python benchmarks/gpu_linear.py --out benchmarks/results/gpu-linear.json
    python benchmarks/gpu_linear.py --table src/paceline/ops/triton/linear_table.py

The second writes the lines of what was faster than the library into the table, which everything that
is started afterwards uses; with `--blocks 128` those alone, and the others stay. Needs PyTorch and
Triton, nothing else. Takes a minute and a half.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import triton
from torch import Tensor

from paceline.bench.machine import Json, machine, source, versions
from paceline.ops.reference import linear as reference
from paceline.ops.triton import fused, linear
from paceline.ops.triton.linear_table import BLOCKS, TABLE, Tiles

CUDA, DTYPE, EPS = torch.device("cuda"), torch.bfloat16, 1e-6
PEAK = 4.24e12  # bytes a second: the best that a plain read of this memory was seen to reach on an H200
COLD = 400 << 20  # bytes of weights between two uses of a copy, several times what a cache holds
READ = 1 << 31  # bytes that a graph reads at least
SHARED = 227 << 10  # bytes of a processor's shared memory that a program can have
ROWS = {16: (1, 8, 16), 32: (32,), 64: (64,), 128: (128,)}  # what is measured of each of BLOCKS


Table = dict[tuple[str, int, int], dict[int, Tiles]]


@dataclass(frozen=True, slots=True)
class Product:
    """An operator and its weight's size."""

    op: str
    n: int
    k: int
    time: float  # of the sweep's; what is measured first compiles for others

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.n * self.k * DTYPE.itemsize


PRODUCTS = (
    Product("linear_add_rms_norm", 4096, 12_288, 0.35),
    Product("linear_add_rms_norm", 4096, 4096, 0.15),
    Product("linear", 6144, 4096, 0.25),
    Product("linear_f32", 151_936, 4096, 0.15),
    Product("linear", 24_576, 4096, 0.1),
)
# Unsplit, better guesses first; what a split costs is a launch, what new tiles cost is a compilation.
TILES = (
    Tiles(block_n=64, block_k=128, num_stages=4),
    Tiles(block_n=32, block_k=256, num_stages=4),
    Tiles(block_n=64, block_k=128, num_stages=4, swap=True),
    Tiles(block_n=64, block_k=256, num_stages=3),
    Tiles(block_n=32, block_k=256, num_stages=3),
    Tiles(block_n=16, block_k=256, num_stages=4),
    Tiles(block_n=64, block_k=128, num_stages=5),
    Tiles(block_n=64, block_k=256, num_stages=3, swap=True),
    Tiles(block_n=32, block_k=128, num_stages=6),
    Tiles(block_n=16, block_k=512, num_stages=3),
    Tiles(block_n=128, block_k=128, num_stages=4, num_warps=8),
    Tiles(block_n=64, block_k=128, num_stages=3),
    Tiles(block_n=128, block_k=64, num_stages=6, swap=True),
    Tiles(block_n=32, block_k=256, num_stages=4, num_warps=8),
)
# From 64 rows on they are read again by every program, so fewer and wider ones too.
WIDE = (
    Tiles(block_n=256, block_k=64, num_stages=4, num_warps=8, swap=True),
    Tiles(block_n=256, block_k=64, num_stages=4, num_warps=8),
    Tiles(block_n=128, block_k=64, num_stages=3, swap=True),
    Tiles(block_n=64, block_k=128, num_stages=3, num_warps=8),
    Tiles(block_n=128, block_k=64, num_stages=4, num_warps=8),
    Tiles(block_n=128, block_k=128, num_stages=3, num_warps=8),
    Tiles(block_n=64, block_k=128, num_stages=4, num_warps=4, swap=True),
    Tiles(block_n=128, block_k=64, num_stages=6, num_warps=8, swap=True),
    Tiles(block_n=64, block_k=64, num_stages=6, num_warps=4),
    Tiles(block_n=128, block_k=64, num_stages=6, num_warps=8),
)


def candidates(product: Product, block: int, processors: int) -> list[Tiles]:
    """Tiles that fit, in splits that give each processor about one to three programs."""
    found: list[Tiles] = []
    few, wide = len(TILES) if block == BLOCKS[0] else 4, 0 if block < BLOCKS[2] else 3
    tried = WIDE if block > BLOCKS[2] else TILES[:few] + WIDE[:wide]
    for tiles in tried:
        depth = (tiles.block_n + block) * tiles.block_k * DTYPE.itemsize
        if depth * tiles.num_stages > SHARED:
            continue
        columns, steps = -(-product.n // tiles.block_n), -(-product.k // tiles.block_k)
        if product.op != "linear_add_rms_norm":  # nothing follows that could add parts
            found.append(tiles)
            continue
        for split in range(1, 13):
            programs = columns * split / processors
            if steps % split == 0 and 0.9 <= programs <= 3.2:
                found.append(replace(tiles, split=split))
    return found


class Bench:
    """A product's tensors: enough copies of the weight, and inputs for so many rows.

    Args:
        product: what is measured.
        repeats: replays of a graph.
    """

    def __init__(self, product: Product, repeats: int) -> None:
        self._product, self._repeats = product, repeats
        copies = max(2, -(-COLD // product.nbytes))
        first = (torch.randn(product.n, product.k, device=CUDA) / product.k**0.5).to(DTYPE)
        self._weights = [first, *(first.clone() for _ in range(copies - 1))]
        self._calls = copies * max(1, -(-READ // (copies * product.nbytes)))
        self._gain = torch.randn(product.n, device=CUDA).to(DTYPE)
        self._x = torch.randn(BLOCKS[-1], product.k, device=CUDA).to(DTYPE)
        self._residual = torch.randn(BLOCKS[-1], product.n, device=CUDA).to(DTYPE)

    def library(self, rows: int, weight: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The operator without own products."""
        x = self._x[:rows]
        if self._product.op == "linear":
            return torch.nn.functional.linear(x, weight)
        if self._product.op == "linear_f32":
            return reference.linear_f32(x, weight)
        out = torch.nn.functional.linear(x, weight)
        return fused.add_rms_norm(out, self._residual[:rows], self._gain, EPS)

    def own(self, rows: int, weight: Tensor, tiles: Tiles) -> Tensor | tuple[Tensor, Tensor]:
        """The operator by the kernels."""
        x = self._x[:rows]
        if self._product.op == "linear_add_rms_norm":
            return linear.product_norm(x, weight, self._residual[:rows], self._gain, EPS, tiles)
        kind = DTYPE if self._product.op == "linear" else torch.float32
        return linear.parts(x, weight, tiles, kind)[0]

    def is_right(self, rows: int, tiles: Tiles) -> bool:
        """Whether the kernels' result is the product; says so if not."""
        made = self.own(rows, self._weights[-1], tiles)
        exact = self._x[:rows].float() @ self._weights[-1].float().T
        found = made[1] if isinstance(made, tuple) else made
        want = exact + self._residual[:rows].float() if isinstance(made, tuple) else exact
        off = float((found.float() - want).norm() / want.norm())
        right = off < (1e-3 if found.dtype == torch.float32 else 5e-3)  # tf32 may have made `want`
        if not right:
            print(f"WRONG: {self._product} of {rows} rows is off by {off:.1e}: {tiles}", flush=True)
        return right

    def us(self, call: Callable[[Tensor], object], repeats: int | None = None) -> float:
        """Microseconds of a call."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call(self._weights[0])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for at in range(self._calls):
                call(self._weights[at % len(self._weights)])
        graph.replay()
        pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for _ in range(repeats or self._repeats):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize()
        times = [float(a.elapsed_time(b)) for a, b in pairs]
        return statistics.median(times) / self._calls * 1e3

    def own_us(self, rows: int, tiles: Tiles, repeats: int | None = None) -> float:
        """Microseconds of the kernels."""
        return self.us(lambda weight: self.own(rows, weight, tiles), repeats)

    def library_us(self, rows: int) -> float:
        """Microseconds of the library."""
        return self.us(lambda weight: self.library(rows, weight))


@dataclass(frozen=True, slots=True)
class Found:
    """What a sweep says: times of tiles, the best first, and tiles whose results were wrong."""

    times: list[tuple[float, Tiles]]
    wrong: list[Tiles]


def sweep(bench: Bench, tried: list[Tiles], block: int, seconds: float) -> Found:
    """Time tiles, at the least and the most rows of a block, whose times are added."""
    times: list[tuple[float, Tiles]] = []
    wrong: list[Tiles] = []
    ends = sorted({ROWS[block][0], ROWS[block][-1]})
    until = time.monotonic() + seconds
    for tiles in tried:
        if times and time.monotonic() > until:
            break
        try:
            right = all(bench.is_right(rows, tiles) for rows in ends)
        except triton.runtime.errors.OutOfResources as error:
            print(f"  {tiles} does not fit: {error}", flush=True)
            continue
        if right:
            times.append((sum(bench.own_us(rows, tiles, 5) for rows in ends), tiles))
        else:
            wrong.append(tiles)
    return Found(sorted(times, key=lambda pair: pair[0]), wrong)


def measure(
    product: Product, args: argparse.Namespace, table: Table, wrong: list[str]
) -> list[Json]:
    """Sweep and measure one product; its lines, and what was faster into the table."""
    lines: list[Json] = []
    bench = Bench(product, args.repeats)
    processors = torch.cuda.get_device_properties(CUDA).multi_processor_count
    shares = {block: 3.0 if block == BLOCKS[0] else 1.0 for block in args.blocks}
    for block in args.blocks:
        share = shares[block] / sum(shares.values())
        tried = candidates(product, block, processors)
        found = sweep(bench, tried, block, args.sweep * product.time * share)
        wrong += [f"{product} at {block} rows with {tiles}" for tiles in found.wrong]
        if not found.times:
            continue
        best = found.times[0][1]
        faster: list[bool] = []
        for rows in ROWS[block]:
            library, own = bench.library_us(rows), bench.own_us(rows, best)
            faster.append(own < library)
            share_of = [product.nbytes / us / PEAK * 1e6 for us in (library, own)]
            lines.append(
                {
                    "op": product.op,
                    "n": product.n,
                    "k": product.k,
                    "rows": rows,
                    "library_us": library,
                    "own_us": own,
                    "library_share": share_of[0],
                    "own_share": share_of[1],
                    "tiles": asdict(best),
                    "tried": len(found.times),
                    "of": len(tried),
                    "sweep": [{"us": us, **asdict(tiles)} for us, tiles in found.times],
                }
            )
            print(
                f"{product.op:20} {product.n:6} {product.k:6} {rows:5} {library:9.2f} "
                f"{share_of[0]:6.1%} {own:9.2f} {share_of[1]:6.1%}  {written(best)}"
                f"  {len(found.times)} of {len(tried)}",
                flush=True,
            )
        if all(faster):
            table.setdefault((product.op, product.n, product.k), {})[block] = best
    return lines


def written(tiles: Tiles) -> str:
    """Tiles as Python, without what is the default."""
    given = [
        f"{f.name}={getattr(tiles, f.name)}"
        for f in fields(tiles)
        if getattr(tiles, f.name) != f.default
    ]
    return f"Tiles({', '.join(given)})"


def lines_of(table: Table) -> str:
    """TABLE's definition, as `linear_table.py` has it."""
    head = "TABLE: dict[tuple[str, int, int], dict[int, Tiles]] = {"
    if not table:
        return head + "}\n"
    text = head + "\n"
    for (op, n, k), rows in table.items():
        if not rows:
            continue
        text += f'    ("{op}", {n}, {k}): {{\n'
        text += "".join(f"        {block}: {written(tiles)},\n" for block, tiles in rows.items())
        text += "    },\n"
    return text + "}\n"


def put(table: Table, into: str) -> str:
    """The text of `linear_table.py` with other lines."""
    before, _, rest = into.partition("TABLE: ")
    _, _, after = rest.partition("}\n\n\n")
    return f"{before}{lines_of(table)}\n\n{after}"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file of the JSON record")
    parser.add_argument("--table", type=Path, help="linear_table.py, whose lines are written anew")
    parser.add_argument(
        "--blocks", type=int, nargs="+", choices=BLOCKS, default=BLOCKS, help="most rows of lines"
    )
    parser.add_argument("--sweep", type=float, default=60.0, help="seconds of all sweeps")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("these kernels need an NVIDIA GPU, and PyTorch finds none; run it on one")
    torch.manual_seed(0)
    print("operator                  N      K  rows  library us  share    own us  share  tiles")
    lines: list[Json] = []
    table: Table = {
        key: {block: tiles for block, tiles in kept.items() if block not in args.blocks}
        for key, kept in TABLE.items()
    }
    wrong: list[str] = []
    with torch.inference_mode():
        for product in PRODUCTS:
            lines += measure(product, args, table, wrong)
            torch.cuda.empty_cache()
    print("\n" + lines_of(table))
    record: dict[str, Json] = {
        "machine": machine(CUDA),
        "source": source(),
        "versions": versions(),
        "peak_bytes_per_s": PEAK,
        "dtype": str(DTYPE)[6:],
        "lines": lines,
        "table": lines_of(table),
        "wrong": list[Json](wrong),
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    if wrong:
        msg = (
            f"{len(wrong)} results were wrong, so no table is written; they are in the lines above"
        )
        raise SystemExit(msg)
    if args.table:
        args.table.write_text(put(table, args.table.read_text()))


if __name__ == "__main__":
    main()
