"""Measures this CPU's operators: the libraries' and our own, side by side.

What it answers: how long all of SmolLM2-135M's matrix products take for so many rows, in which
representation; for which row counts a row's bits stay the same; what element-wise work and attention
cost against PyTorch's; what large pages bring. Ways take turns, so that a busy machine disturbs all
alike; each figure is a median, with the least beside it. Products are also measured on one thread by
its processor time, which other processes hardly disturb. Weights are random: times don't depend on
them.

    python benchmarks/cpu_ops.py --out benchmarks/results/cpu-ops.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from paceline import ops
from paceline.attention import BACKENDS
from paceline.attention.base import PagedAttend
from paceline.bench.machine import machine, source, versions
from paceline.core.batch import AttnSite, ForwardBatch, ForwardMode
from paceline.kv.layout import Heads
from paceline.kv.pool import KVPool
from paceline.ops.cpu import dense, fused, groups
from paceline.ops.cpu.build import built
from paceline.ops.cpu.native import native
from paceline.ops.reference import fused as reference

LAYERS, HIDDEN, INNER, VOCAB = 30, 576, 1536, 49152
SHAPES = ((960, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
ROWS = (1, 2, 4, 8, 16, 32, 64)
COMPANY = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 96, 128, 256, 300, 511)

Times = dict[str, dict[str, float]]
Product = Callable[[Tensor], Tensor]


def alternate(
    ways: Mapping[str, Callable[[], object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Milliseconds of every way: median and least of `repeats`, taking turns.

    Each turn starts with a call that is not timed: OpenMP's threads keep spinning for milliseconds
    after a call, and would sit on the cores of the next way's.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, call in ways.items():
            call()
            start = clock()
            call()
            found[name].append(1e3 * (clock() - start))
    return {
        name: {"median": round(statistics.median(t), 4), "least": round(min(t), 4)}
        for name, t in found.items()
    }


def show(title: str, times: Times) -> None:
    """One line per way."""
    for name, t in times.items():
        print(f"{title:24} {name:34} {t['median']:10.3f} ms, least {t['least']:.3f}", flush=True)


def plain(weight: Tensor) -> Product:
    """PyTorch's own product."""
    return lambda x: functional.linear(x, weight)


def onednn(weight: Tensor) -> Product:
    """OneDNN with the weight laid out once, as the compiler backend uses it."""
    held = torch.ops.mkldnn._reorder_linear_weight(weight, 8)  # noqa: SLF001
    point = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
    return lambda x: point(x, held, None, "none", [], "")


def own(weight: Tensor | ops.Groups) -> Product:
    """Ours, in the weight's own representation."""
    held = ops.pack(weight, "auto", torch.bfloat16)
    return lambda x: ops.linear(x, held)


def without_tiles(weight: Tensor) -> Product:
    """Ours as on a processor without AMX, or where the system refuses it."""
    lib = native()
    assert lib is not None, "there are no own kernels"
    return dense.DenseWeight.pack(weight, replace(lib, tiles=False)).matmul


def torch_int4(weight: Tensor) -> Product:
    """PyTorch's packed 4-bit product, groups of 32."""
    held = groups.TorchInt4Weight.pack(ops.quantize(weight, bits=4), torch.bfloat16)
    return held.matmul


def torch_int8(weight: Tensor) -> Product:
    """PyTorch's packed 8-bit product, one scale per output feature."""
    scales = (weight.float().abs().amax(1) / 127).bfloat16()
    codes = (weight.float() / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    product = torch.ops.aten._weight_int8pack_mm
    return lambda x: product(x, codes, scales)


def ways_to_multiply() -> dict[str, Callable[[Tensor, int], Product]]:
    """Name -> maker of a product from a matrix and the bits that a GGUF file would give it."""
    found: dict[str, Callable[[Tensor, int], Product]] = {
        "bf16, torch linear": lambda w, _: plain(w),
        "int4 g32, torch": lambda w, bits: torch_int4(w) if bits == 4 else torch_int8(w),
        "int8 per row, torch": lambda w, _: torch_int8(w),
    }
    if torch.backends.mkldnn.is_available():
        found["bf16, oneDNN prepacked"] = lambda w, _: onednn(w)
    lib = native()
    if lib is not None:
        found["bf16, own"] = lambda w, _: own(w)
        if lib.tiles:
            found["bf16, own without AMX"] = lambda w, _: without_tiles(w)
        if lib.groups:
            found["4-bit, head 8-bit, own"] = lambda w, bits: own(ops.quantize(w, bits=bits))
    return found


def products(repeats: int) -> dict[str, object]:
    """All products of one step, by rows; and row counts at which bits differ from 512 rows'."""
    matrices = [(torch.randn(n, k) * k**-0.5).bfloat16() for _ in range(LAYERS) for n, k in SHAPES]
    matrices.append((torch.randn(VOCAB, HIDDEN) * HIDDEN**-0.5).bfloat16())
    made: dict[str, list[Product]] = {}
    for name, make in ways_to_multiply().items():
        last = len(matrices) - 1
        made[name] = [make(w, 8 if i == last else 4) for i, w in enumerate(matrices)]
    inputs = {k: torch.randn(512, k).bfloat16() for k in (HIDDEN, INNER)}
    widths = [w.shape[1] for w in matrices]

    def step(calls: Sequence[Product], rows: int) -> Callable[[], object]:
        return lambda: [call(inputs[k][:rows]) for call, k in zip(calls, widths, strict=True)]

    found: dict[str, object] = {}
    for rows in ROWS:
        times = alternate({name: step(calls, rows) for name, calls in made.items()}, repeats)
        show(f"products, {rows} rows", times)
        found[str(rows)] = times
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone: dict[str, object] = {}
    for rows in (1, 8, 16, 64):
        steps = {name: step(calls, rows) for name, calls in made.items()}
        times = alternate(steps, repeats, time.thread_time)
        show(f"one thread, {rows} rows", times)
        alone[str(rows)] = times
    torch.set_num_threads(threads)
    differ = {}
    for name, calls in made.items():
        some = [*calls[:4], calls[-1]]
        each = list(zip(some, [*widths[:4], HIDDEN], strict=True))
        every = [call(inputs[k]) for call, k in each]
        differ[name] = [
            rows
            for rows in COMPANY
            if any(
                not torch.equal(call(inputs[k][:rows]), e[:rows])
                for (call, k), e in zip(each, every, strict=True)
            )
        ]
        print(f"bits differ from 512 rows': {name:28} at {differ[name] or 'no'} rows", flush=True)
    return {
        "milliseconds_by_rows": found,
        "one_thread_processor_milliseconds_by_rows": alone,
        "row_counts_with_other_bits_than_512_rows": differ,
    }


def errors() -> dict[str, object]:
    """Relative error of each product's outputs against float64 with the same (dequantised) weights."""
    found: dict[str, object] = {}
    for n, k in ((HIDDEN, INNER), (VOCAB, HIDDEN)):
        weight, x = (torch.randn(n, k) * k**-0.5).bfloat16(), torch.randn(16, k).bfloat16()
        makers: dict[str, tuple[Product, Tensor]] = {"bf16, torch": (plain(weight), weight)}
        if native() is not None:
            makers["bf16, own"] = (own(weight), weight)
        for bits in (4, 8):
            held = ops.quantize(weight, bits=bits)
            values = held.dequantize(torch.float64)
            if native() is not None:
                makers[f"{bits}-bit, own"] = (own(held), values)
            if bits == 4:
                makers["4-bit, torch"] = (torch_int4(weight), values)
        makers["8-bit per row, torch, against bf16 weights"] = (torch_int8(weight), weight)
        for name, (call, values) in makers.items():
            exact = x.double() @ values.double().T
            error = (call(x).double() - exact).square().mean() / exact.square().mean()
            found[f"{name} [{n}, {k}]"] = round(float(error.sqrt()), 6)
    for name, value in found.items():
        print(f"relative error           {name:52} {value}", flush=True)
    return found


def elementwise(repeats: int, *, inductor: bool) -> dict[str, object]:
    """Microseconds per call of norms, gate and rope for 1 and 8 rows."""
    found: dict[str, object] = {}
    weight = torch.randn(HIDDEN).bfloat16()
    cos_sin = torch.randn(2048, 64)
    for rows in (1, 8):
        x, residual = torch.randn(2, rows, HIDDEN).bfloat16()
        gates = torch.randn(rows, 2 * INNER).bfloat16()
        q, k = torch.randn(rows, 9, 64).bfloat16(), torch.randn(rows, 3, 64).bfloat16()
        places = torch.arange(rows)
        calls: dict[str, Callable[..., object]] = {}
        for name, args in {
            "add_rms_norm": (x, residual, weight, 1e-5),
            "silu_mul": (gates,),
            "rope": (q, k, places, cos_sin),
        }.items():
            ways = {f"{name}, torch": getattr(reference, name)}
            if native() is not None:
                ways[f"{name}, own"] = getattr(fused, name)
            if inductor:
                ways[f"{name}, inductor"] = torch.compile(getattr(reference, name), dynamic=False)
            for way, function in ways.items():
                calls[way] = lambda f=function, a=args: [f(*a) for _ in range(100)]
        times = alternate(calls, repeats)
        show(f"100 calls, {rows} rows", times)
        found[str(rows)] = {
            way: {stat: round(10 * t, 2) for stat, t in stats.items()}
            for way, stats in times.items()
        }
    return found


def attention(repeats: int) -> dict[str, object]:
    """Milliseconds of attention in all layers, writing keys included, by backend."""
    layout = Heads(3, 64)
    found: dict[str, object] = {}
    for context, rows, nodes in ((300, 1, 1), (300, 1, 8), (300, 8, 1), (2000, 1, 1), (2000, 8, 1)):
        batch, pool = a_pass(layout, context, rows, nodes)
        tokens = rows * nodes
        q = torch.randn(tokens, 9, 64).bfloat16()
        k, v = torch.randn(2, tokens, 3, 64).bfloat16()
        ways: dict[str, Callable[[], object]] = {}
        for name in BACKENDS:
            try:
                backend = BACKENDS.get(name)()
            except ImportError:
                continue
            if backend.refuses(layout, torch.device("cpu"), torch.bfloat16, 16) is not None:
                continue

            ways[name] = all_layers(PagedAttend(backend, pool, batch), q, k, v)
        title = f"{rows} x {nodes} at {context}"
        found[title] = alternate(ways, repeats)
        show(title, found[title])  # type: ignore[arg-type]
    return found


def all_layers(attend: PagedAttend, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    """A pass through one backend, its plan included."""

    def call() -> object:
        attend.backend.plan(attend.batch)
        return [attend.heads(AttnSite(index=i, scale=0.125), q, k, v) for i in range(LAYERS)]

    return call


def a_pass(layout: Heads, context: int, rows: int, nodes: int) -> tuple[ForwardBatch, KVPool]:
    """A verify of chains after `context` cached tokens each, in a pool of random keys."""
    per_row = (context + nodes) // 16 + 1
    pool = KVPool(layout, LAYERS, rows * per_row, 16, torch.bfloat16, "cpu")
    pool.k.normal_()
    pool.v.normal_()
    pages = torch.arange(rows * per_row, dtype=torch.int32).view(rows, per_row)
    places = torch.arange(context, context + nodes)
    slots = (pages[:, places // 16].long() * 16 + places % 16).flatten()
    batch = ForwardBatch(
        mode=ForwardMode.BLOCK,
        num_rows=rows,
        q_len=nodes,
        rows=torch.arange(rows),
        token_ids=torch.zeros(rows * nodes, dtype=torch.int64),
        positions=places.repeat(rows),
        slots=slots,
        prefix_lens=torch.full((rows,), context),
        cu_q=torch.arange(rows + 1) * nodes,
        tail_lens=torch.full((rows,), nodes),
        mask=torch.tensor([[2 ** (i + 1) - 1] for i in range(nodes)]).repeat(rows, 1),
        pages=pages,
    )
    return batch, pool


def large_pages(repeats: int) -> dict[str, object]:
    """One row through all bf16 matrices: weights in large pages, and in plain memory."""
    lib = native()
    if lib is None:
        return {}
    weights = [torch.randn(n, k).bfloat16() for _ in range(LAYERS) for n, k in SHAPES]
    large = [dense.DenseWeight.pack(w, lib) for w in weights]
    small = []
    for held in large:
        blocks = held.blocks.clone()
        small.append(
            dense.DenseWeight(blocks=blocks, shape=held.shape, lib=lib, address=blocks.data_ptr())
        )
    inputs = {k: torch.randn(1, k).bfloat16() for k in (HIDDEN, INNER)}
    times = alternate(
        {
            "large pages": lambda: [w.matmul(inputs[w.shape[1]]) for w in large],
            "plain memory": lambda: [w.matmul(inputs[w.shape[1]]) for w in small],
        },
        repeats,
    )
    show("layers, 1 row", times)
    return dict(times)


def main() -> None:
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu-ops.json"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--inductor", action="store_true", help="also compile with inductor")
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        record = {
            "schema": "paceline/cpu-ops/1",
            "model_shapes": "SmolLM2-135M",
            "machine": machine(torch.device("cpu")),
            "versions": versions(),
            "source": source(),
            "load_average_before": os.getloadavg(),
            "kernels": {"compiler": built().compiler, "refused": built().reason},
            "products": products(args.repeats),
            "relative_error": errors(),
            "microseconds_per_call": elementwise(args.repeats, inductor=args.inductor),
            "attention_milliseconds": attention(args.repeats),
            "large_pages_milliseconds": large_pages(args.repeats),
        }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
