"""Measures what lies between the products of a layer on a GPU: norms, rope with cache write, SwiGLU.

What it answers: microseconds of each fused operator and of its definition in plain PyTorch, for passes
of 1 to 512 tokens at the shapes of Qwen3-8B; and what that makes a layer. "Cold": between two calls
other memory is written, so that nothing is in a cache; "warm": one call after the other on the same
tensors, which is nearer to service, where a product wrote the input just before. Calls are captured,
and replays timed by events, so the host has no part in it; what the writing between them takes is
measured alone and subtracted. Results are compared with the definition's before anything is timed.

    python benchmarks/gpu_fused.py --out benchmarks/results/h200-fused.json

Needs PyTorch and Triton, nothing else. Takes a minute.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from paceline.bench.machine import Json, machine, source, versions
from paceline.cli.workbench import command_line
from paceline.ops.reference import fused as reference
from paceline.ops.triton import fused

CUDA, DTYPE = torch.device("cuda"), torch.bfloat16
HIDDEN, INNER, Q_HEADS, KV_HEADS, DIM = 4096, 12_288, 32, 8, 128
EPS, SLOTS, POSITIONS = 1e-6, 1 << 16, 4096
# How often a layer of the fused pass calls each operator.
IN_A_LAYER = {"add_rms_norm": 2, "rope_write": 1, "silu_mul": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An operator and its definition on the same tensors."""

    name: str
    own: Callable[[], object]
    plain: Callable[[], object]
    moved: int  # bytes that must be read and written once


def cases(tokens: int) -> list[Case]:
    """Each operator at so many tokens."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=CUDA).to(DTYPE)

    x, stream, weight = normal(tokens, HIDDEN), normal(tokens, HIDDEN), normal(HIDDEN)
    gate_up = normal(tokens, 2 * INNER)
    heads = Q_HEADS + 2 * KV_HEADS
    qkv, norms = normal(tokens, heads * DIM), (normal(DIM), normal(DIM))
    slots = torch.randperm(SLOTS - 1, device=CUDA)[:tokens]
    positions = torch.randint(POSITIONS, (tokens,), device=CUDA)
    table = torch.rand(POSITIONS, DIM, device=CUDA)
    caches = torch.zeros(2, KV_HEADS, SLOTS, DIM, dtype=DTYPE, device=CUDA)
    q = qkv[:, : Q_HEADS * DIM].view(tokens, Q_HEADS, DIM)
    k, v = (part.view(tokens, KV_HEADS, DIM) for part in qkv[:, Q_HEADS * DIM :].chunk(2, dim=1))
    row, size = tokens * HIDDEN, DTYPE.itemsize

    def case(name: str, moved: int, *args: object) -> Case:
        own, plain = getattr(fused, name), getattr(reference, name)
        return Case(name=name, own=lambda: own(*args), plain=lambda: plain(*args), moved=moved)

    return [
        case("rms_norm", 2 * row * size, x, weight, EPS),
        case("add_rms_norm", 4 * row * size, x, stream, weight, EPS),
        case(
            "rope_write",
            2 * tokens * heads * DIM * size + tokens * DIM * 4,
            *(qkv, positions, table, slots, caches[0], caches[1], norms, EPS),
        ),
        case("silu_mul", 3 * tokens * INNER * size, gate_up),
        case(
            "rope",
            2 * tokens * (Q_HEADS + KV_HEADS) * DIM * size + tokens * DIM * 4,
            *(q, k, positions, table),
        ),
        case("kv_write", 4 * tokens * KV_HEADS * DIM * size, caches[0], caches[1], slots, k, v),
    ]


def compare(case: Case) -> None:
    """Stop if an operator's result is not its definition's."""

    def results(call: Callable[[], object]) -> list[Tensor]:
        found = call()
        return [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]

    for a, b in zip(results(case.own), results(case.plain), strict=True):
        off = float((a.float() - b.float()).norm() / b.float().norm())
        if not off < 1e-2:
            msg = f"{case.name} is off by {off:.1e}"
            raise SystemExit(msg)


def captured(call: Callable[[], object], count: int) -> torch.cuda.CUDAGraph:
    """So many calls as a graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph


def took(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Replay a graph between two events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    stop.record()
    return start, stop


class Clock:
    """Times calls.

    Args:
        repeats: replays of a graph; medians are taken.
        count: calls in a graph.
    """

    def __init__(self, repeats: int, count: int) -> None:
        self._repeats, self._count = repeats, count
        cache = torch.cuda.get_device_properties(CUDA).L2_cache_size
        self._other = torch.empty(2 * cache, dtype=torch.uint8, device=CUDA)
        self._alone = captured(self._flush, count)

    def _flush(self) -> None:
        self._other.zero_()

    def cold(self, call: Callable[[], object]) -> float:
        """Microseconds of a call whose tensors are in no cache."""

        def both() -> None:
            self._flush()
            call()

        graph = captured(both, self._count)
        pairs = [(took(graph), took(self._alone)) for _ in range(self._repeats)]
        torch.cuda.synchronize()
        more = [a.elapsed_time(b) - c.elapsed_time(d) for (a, b), (c, d) in pairs]
        return statistics.median(more) / self._count * 1e3

    def warm(self, call: Callable[[], object]) -> float:
        """Microseconds of a call that follows the same call."""
        graph = captured(call, self._count)
        events = [took(graph) for _ in range(self._repeats)]
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in events) / self._count * 1e3


def measure(clock: Clock, tokens: int) -> list[dict[str, Json]]:
    """One line for each operator, and one for a layer."""
    lines: list[dict[str, Json]] = []
    layer = dict.fromkeys(("us", "warm_us", "torch_us", "torch_warm_us"), 0.0)
    for case in cases(tokens):
        compare(case)
        times = {
            "us": clock.cold(case.own),
            "warm_us": clock.warm(case.own),
            "torch_us": clock.cold(case.plain),
            "torch_warm_us": clock.warm(case.plain),
        }
        for key, value in times.items():
            layer[key] += IN_A_LAYER.get(case.name, 0) * value
        rate = case.moved / times["us"] * 1e6
        lines.append(
            {"op": case.name, "tokens": tokens, "bytes": case.moved, "bytes_per_s": rate, **times}
        )
    lines.append({"op": "layer", "tokens": tokens, "calls": dict(IN_A_LAYER), **layer})
    return lines


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file of the JSON record")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 16, 64, 512])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20, help="calls in a graph")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("these kernels need an NVIDIA GPU, and PyTorch finds none; run it on one")
    torch.manual_seed(0)
    clock = Clock(args.repeats, args.calls)
    print("tokens   op             us cold    warm   torch cold    warm   x faster")
    lines: list[Json] = []
    with torch.inference_mode():
        for tokens in args.tokens:
            for line in measure(clock, tokens):
                own, warm, plain, plain_warm = (
                    float(str(line[k])) for k in ("us", "warm_us", "torch_us", "torch_warm_us")
                )
                print(
                    f"{tokens:6}   {line['op']:13} {own:8.2f} {warm:7.2f} {plain:12.2f} "
                    f"{plain_warm:7.2f} {plain / own:10.1f}",
                    flush=True,
                )
                lines.append(line)
    record: dict[str, Json] = {
        "schema": "paceline-fused/1",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "benchmarks/gpu_fused.py", *command_line()[1:]],
        "machine": machine(CUDA),
        "source": source(),
        "versions": versions() | {"triton": __import__("triton").__version__},
        "shapes": {
            "hidden": HIDDEN,
            "inner": INNER,
            "q_heads": Q_HEADS,
            "kv_heads": KV_HEADS,
            "dim": DIM,
            "dtype": str(DTYPE)[6:],
            "norms_of_heads": True,
        },
        "lines": lines,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
