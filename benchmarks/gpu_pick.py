"""Measures picking tokens from logits on a GPU: own kernels beside the definition in PyTorch.

What it answers: microseconds for 1 to 1,024 rows of a vocabulary of 152,064 float32 logits, for greedy
rows, temperature 1, top_k, top_p, and rows of all kinds together; and what part of the measured read
bandwidth one read of the logits in that time would be. Both ways are captured graphs, of which replays
are timed by events; the definition goes through its chunks of 128 rows. Tokens are compared first.

Two kinds of logits: "steep" falls with the logarithm of the rank as a language model's do (a nucleus of
0.9 is hundreds of tokens), "flat" is normal noise (tens of thousands).

    python benchmarks/gpu_pick.py --out benchmarks/results/gpu-pick.json

Needs PyTorch and Triton, nothing else; a minute or two.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from paceline.bench.machine import Json, machine, source, versions
from paceline.core.request import SamplingParams
from paceline.sample.device import choose_by_kernels
from paceline.sample.options import SamplingTable
from paceline.sample.sampler import Chooser, PickNodes, choose, pick_by

CUDA = torch.device("cuda")
OPTIONS = {
    "greedy": [SamplingParams(temperature=0)],
    "temperature 1": [SamplingParams()],
    "top_k 50": [SamplingParams(top_k=50)],
    "top_p 0.9": [SamplingParams(top_p=0.9)],
    "top_k 50, top_p 0.9, min_p 0.01": [SamplingParams(top_k=50, top_p=0.9, min_p=0.01)],
    "all kinds of rows": [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=50),
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.95, min_p=0.05),
    ],
}


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median of repeats on the device's clock."""
    for _ in range(2):
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


def graph_of(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The call, captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def logits_of(kind: str, rows: int, size: int) -> Tensor:
    """[rows, V] float32."""
    noise = torch.randn(rows, size, device=CUDA)
    if kind == "flat":
        return noise
    falls = -1.2 * torch.arange(1, size + 1, device=CUDA).log()
    # A shuffle that all rows share: likely tokens lie anywhere.
    return (falls[torch.randperm(size, device=CUDA)] + 0.7 * noise).contiguous()


def table_of(params: list[SamplingParams], rows: int, size: int) -> SamplingTable:
    """`rows` rows that take the options in turn."""
    table = SamplingTable(rows, size, CUDA, 0)
    for row in range(rows):
        table.assign(
            row,
            params[row % len(params)],
            seed=row,
            sample_index=0,
            prompt_ids=[1],
            output_ids=[],
            stop_ids=[],
            limit=10**6,
        )
    table.apply()
    return table


def nodes_of(rows: int) -> PickNodes:
    """One node a row."""
    ids = torch.arange(rows, device=CUDA)
    return PickNodes(
        rows=ids,
        positions=ids % 7 + 100,
        num_output=ids * 0 + 99,
        path_tokens=ids.new_empty(rows, 0),
        allowed=None,
        host_rows=range(rows),
    )


def measure(
    chooser: Chooser, logits: Tensor, table: SamplingTable, chunk: int, repeats: int
) -> tuple[float, Tensor]:
    """Seconds of one pick of all rows, and its tokens."""
    nodes = nodes_of(logits.shape[0])

    def call() -> Tensor:
        return pick_by(chooser, logits, lambda x: x, nodes, table, chunk).tokens

    tokens = call()
    graph = graph_of(call)
    return seconds(graph.replay, repeats), tokens


def read_bandwidth(repeats: int) -> float:
    """Bytes a second of the better of two ways to read 4 GB."""
    data = torch.empty(1 << 30, dtype=torch.float32, device=CUDA).normal_()
    return data.nbytes / min(seconds(f, repeats) for f in (data.sum, data.amax))


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file of the JSON record")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 512, 1024])
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--logits", nargs="+", choices=("steep", "flat"), default=["steep", "flat"])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("these kernels need an NVIDIA GPU, and PyTorch finds none; run it on one")
    torch.manual_seed(0)
    read = read_bandwidth(args.repeats)
    torch.cuda.empty_cache()
    print(f"read {read / 1e12:.2f} TB/s")
    print(
        "logits  options                           rows    us  reads   torch us  x faster  differ"
    )
    lines: list[Json] = []
    for kind in args.logits:
        for name, params in OPTIONS.items():
            for rows in args.rows:
                logits = logits_of(kind, rows, args.vocabulary)
                table = table_of(params, rows, args.vocabulary)
                took, tokens = measure(choose_by_kernels, logits, table, rows, args.repeats)
                torch_took, want = measure(choose, logits, table, 128, 5)
                differ = int((tokens != want).sum())
                reads = took * read / logits.nbytes
                print(
                    f"{kind:7} {name:32} {rows:5} {took * 1e6:6.0f} {reads:6.1f} "
                    f"{torch_took * 1e6:10.0f} {torch_took / took:8.1f} {differ:7}",
                    flush=True,
                )
                lines.append(
                    {
                        "logits": kind,
                        "options": name,
                        "rows": rows,
                        "us": took * 1e6,
                        "reads_of_the_logits": reads,
                        "torch_us": torch_took * 1e6,
                        "tokens_that_differ": differ,
                    }
                )
                del logits, table
                torch.cuda.empty_cache()
    record: dict[str, Json] = {
        "machine": machine(CUDA),
        "source": source(),
        "versions": versions() | {"triton": __import__("triton").__version__},
        "vocabulary": args.vocabulary,
        "bandwidth": {"read": read},
        "lines": lines,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
