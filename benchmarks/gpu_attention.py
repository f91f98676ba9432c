"""Measures attention of one decode step on a GPU: Triton's kernels and SDPA beside the memory's speed.

What it answers: how many bytes of keys and values a second attention reads, for many short rows, some
rows of a thousand tokens and one long row, each verifying 1, 8 and 32 nodes, for few rows that verify
trees or draft blocks, and for rows of unequal trees; what part of the measured read bandwidth that is;
what gathering keys for SDPA takes instead. All layers of a model are run, each with keys of its own
(gigabytes), so that nothing is in a cache; Triton's as one captured graph, of which replays are timed
by events. Results are compared with SDPA's before anything is timed.

    python benchmarks/gpu_attention.py --out benchmarks/results/gpu-attention.json
    python benchmarks/gpu_attention.py --sweep --out sweep.json     which tiles are fastest

Needs PyTorch and Triton, nothing else. Without --sweep less than a minute, most of it compilation. What
--sweep does is in `gpu_attention_sweep.py`; it takes two to three minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.attention.sdpa import SdpaAttention
from paceline.attention.triton import TritonAttention
from paceline.bench.machine import Json, machine, source, versions
from paceline.core.batch import AttnSite, ForwardBatch, ForwardMode
from paceline.kv.layout import Heads
from paceline.kv.pool import KVPool
from paceline.ops.triton.grid import Tiles

PAGE = 16
CUDA = torch.device("cuda")
SDPA_LAYERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Rows of one length in one model."""

    name: str
    rows: int
    context: int
    q_heads: int
    kv_heads: int
    dim: int
    layers: int


ROWS = Shape(name="rows", rows=1024, context=400, q_heads=9, kv_heads=3, dim=64, layers=30)
MEDIUM = Shape(name="medium", rows=64, context=1024, q_heads=32, kv_heads=8, dim=128, layers=32)
FEW = Shape(name="few", rows=8, context=1024, q_heads=32, kv_heads=8, dim=128, layers=32)
LONG = Shape(name="long", rows=1, context=32_768, q_heads=32, kv_heads=8, dim=128, layers=32)


def seconds(call: Callable[[], object], repeats: int, warm_ups: int = 2) -> float:
    """Median of repeats on the device's clock."""
    for _ in range(warm_ups):
        call()
    events = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in events) / 1e3


def bandwidth(repeats: int) -> dict[str, float]:
    """Bytes a second: the best of two ways to read 4 GB, and a copy (read and written bytes)."""
    data = torch.empty(1 << 30, dtype=torch.float32, device=CUDA).normal_()
    other = torch.empty_like(data)
    reads = [seconds(f, repeats) for f in (data.sum, data.amax)]
    copy = seconds(lambda: other.copy_(data), repeats)
    return {"read": data.nbytes / min(reads), "copy": 2 * data.nbytes / copy}


@dataclass(frozen=True, slots=True)
class Nodes:
    """How many queries each row has, repeated over the rows, and what they see of each other."""

    counts: tuple[int, ...]
    block: bool = False  # each sees the whole block, as in a block draft; otherwise a binary tree

    def of(self, shape: Shape) -> list[int]:
        """Queries of each row."""
        return [self.counts[row % len(self.counts)] for row in range(shape.rows)]

    @property
    def name(self) -> str:
        """For people."""
        least, most = min(self.counts), max(self.counts)
        size = str(most) if least == most else f"{least}-{most}"
        return f"{size} block" if self.block else size


def _same(*several: int) -> tuple[Nodes, ...]:
    return tuple(Nodes((n,)) for n in several)


RAGGED = Nodes((1, 1, 2, 2, 3, 3, 4, 16))  # a mean of 4
# The first line of a shape is what its others are compared with.
LINES = (
    (ROWS, _same(1, 8, 32)),
    (MEDIUM, _same(1, 8, 32)),
    (LONG, _same(1, 8, 32)),
    (FEW, (*_same(1, 16), Nodes((16,), block=True))),
    (MEDIUM, (*_same(4), RAGGED)),
)


def make_pool(shape: Shape, most: int) -> tuple[KVPool, Tensor]:
    """Random keys and values, in pages that are scattered over the pool: pool and page table."""
    per_row = -(-(shape.context + most) // PAGE)
    pool = KVPool(
        Heads(shape.kv_heads, shape.dim),
        shape.layers,
        shape.rows * per_row,
        PAGE,
        torch.bfloat16,
        CUDA,
    )
    pool.k.normal_()
    pool.v.normal_()
    order = torch.randperm(pool.num_pages, device=CUDA)
    return pool, order.view(shape.rows, per_row).int()


def make_batch(shape: Shape, nodes: Nodes, pages: Tensor) -> ForwardBatch:
    """Every row verifies a binary tree or drafts a block; one node is plain decoding, without a mask."""
    counts, most = nodes.of(shape), max(nodes.counts)
    sees, depths = [1], [0]
    for i in range(1, most):
        sees.append(sees[(i - 1) // 2] | 1 << i)
        depths.append(depths[(i - 1) // 2] + 1)
    bits = [(1 << n) - 1 if nodes.block else sees[i] for n in counts for i in range(n)]
    depth = [i if nodes.block else depths[i] for n in counts for i in range(n)]
    tails = torch.tensor(counts, device=CUDA)
    lens = torch.full_like(tails, shape.context)
    return ForwardBatch(
        mode=ForwardMode.BLOCK,
        num_rows=shape.rows,
        q_len=most,
        rows=torch.arange(shape.rows, device=CUDA),
        token_ids=torch.zeros(len(bits), dtype=torch.int64, device=CUDA),
        positions=shape.context + torch.tensor(depth, device=CUDA),
        slots=torch.full((len(bits),), -1, device=CUDA),
        prefix_lens=lens,
        cu_q=torch.cat([tails.new_zeros(1), tails.cumsum(0)]),
        tail_lens=tails,
        mask=torch.tensor(bits, device=CUDA)[:, None] if most > 1 else None,
        pages=pages,
    )


def moved(shape: Shape, nodes: Nodes) -> int:
    """Bytes that one layer must read and write once."""
    queries = sum(nodes.of(shape))
    keys = (shape.rows * shape.context + queries) * shape.kv_heads * shape.dim * 2
    return 2 * (keys + queries * shape.q_heads * shape.dim * 2)


class Step:
    """One decode step's attention in all layers.

    The kernels get a page table of twice the width, as in service, where its width is a power of two
    or has room for what is generated; SDPA gets one that fits, since it gathers all of it.
    """

    def __init__(self, shape: Shape, nodes: Nodes, pool: KVPool, pages: Tensor) -> None:
        self.pool = pool
        self.fitting = make_batch(shape, nodes, pages)
        self.batch = replace(self.fitting, pages=torch.cat([pages, torch.zeros_like(pages)], 1))
        self.q = torch.randn(
            sum(nodes.of(shape)), shape.q_heads, shape.dim, dtype=torch.bfloat16, device=CUDA
        )
        self.sites = [AttnSite(index=i, scale=shape.dim**-0.5) for i in range(shape.layers)]

        self._exact: Tensor | None = None

    def run(self, backend: TritonAttention | SdpaAttention, layers: int) -> Tensor:
        """Attention of some layers, one after the other; the last one's result."""
        batch = self.batch if isinstance(backend, TritonAttention) else self.fitting
        for site in self.sites[:layers]:
            out = backend.heads(site, self.q, self.pool, batch)
        return out

    def triton(self, repeats: int, tiles: Tiles | None, passes: int = 1) -> float:
        """Seconds of all layers, so many times, as one graph; checked against SDPA first."""
        backend = TritonAttention(tiles)
        backend.plan(self.batch)
        self._compare(backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(passes):
                self.run(backend, len(self.sites))
        return seconds(graph.replay, repeats)

    def sdpa(self, repeats: int) -> float:
        """Seconds of one layer."""
        backend = SdpaAttention()
        backend.plan(self.fitting)
        return seconds(lambda: self.run(backend, SDPA_LAYERS), repeats, 1) / SDPA_LAYERS

    def _compare(self, backend: TritonAttention) -> None:
        if self._exact is None:
            exact = SdpaAttention()
            exact.plan(self.fitting)
            self._exact = self.run(exact, 1).float()
        found, want = self.run(backend, 1).float(), self._exact
        off = float((found - want).norm() / want.norm())
        if not off < 1e-2:
            msg = f"the kernels' result is off by {off:.1e}"
            raise SystemExit(msg)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file of the JSON record")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sweep", action="store_true", help="find the fastest tiles instead")
    parser.add_argument("--budget", type=float, default=140.0, help="seconds of --sweep")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("these kernels need an NVIDIA GPU, and PyTorch finds none; run it on one")
    torch.manual_seed(0)
    record: dict[str, Json] = {
        "machine": machine(CUDA),
        "source": source(),
        "versions": versions() | {"triton": __import__("triton").__version__},
    }
    ceiling = bandwidth(args.repeats)
    torch.cuda.empty_cache()
    print(f"read {ceiling['read'] / 1e12:.2f} TB/s, copy {ceiling['copy'] / 1e12:.2f} TB/s")
    record["bandwidth"] = dict(ceiling)
    if args.sweep:
        from gpu_attention_sweep import run

        record["points"] = run(args.budget, ceiling["read"])
    else:
        record["lines"] = measure(args.repeats, ceiling["read"])
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def measure(repeats: int, ceiling: float) -> list[Json]:
    """Print and return a line for each shape and number of nodes."""
    print("shape    nodes     us/layer  GB/s  of read  x first   sdpa us/layer  x faster")
    lines: list[Json] = []
    for shape, several in LINES:
        pool, pages = make_pool(shape, max(max(nodes.counts) for nodes in several))
        first = None
        for nodes in several:
            step = Step(shape, nodes, pool, pages)
            took = step.triton(repeats, None) / shape.layers
            gathered = step.sdpa(5)
            first = first or took
            rate = moved(shape, nodes) / took
            print(
                f"{shape.name:8} {nodes.name:8} {took * 1e6:9.1f} {rate / 1e9:5.0f} "
                f"{rate / ceiling:8.2f} {took / first:8.2f} {gathered * 1e6:15.1f} "
                f"{gathered / took:9.1f}",
                flush=True,
            )
            line: dict[str, Json] = {
                **asdict(shape),
                "nodes": nodes.name,
                "queries": sum(nodes.of(shape)),
                "layer_us": took * 1e6,
                "against_first": took / first,
                "step_ms": took * shape.layers * 1e3,
                "bytes_per_s": rate,
                "of_read_bandwidth": rate / ceiling,
                "sdpa_layer_us": gathered * 1e6,
            }
            lines.append(line)
            del step
        del pool
        torch.cuda.empty_cache()
    return lines


if __name__ == "__main__":
    main()
