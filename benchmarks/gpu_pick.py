"""Measures picking tokens from logits on a GPU: own kernels beside the definition in PyTorch.

What it answers: microseconds for 1 to 1,024 rows of a vocabulary of 151,936 float32 logits, for greedy
rows, temperature 1, top_k, top_p, and rows of all kinds together; and what part of the measured read
bandwidth one read of the logits in that time would be. Both ways are captured graphs, of which replays
are timed by events; the definition goes through its chunks of 128 rows. Tokens are compared first.

Two kinds of logits: "steep" falls with the logarithm of the rank as a language model's do (a nucleus of
0.9 is hundreds of tokens), "flat" is normal noise (tens of thousands).

Penalties, bias and token masks are passes of PyTorch over the logits before the kernels, in chunks of 128
positions. Their lines say what a pick takes with them and what without: up to 16 rows have them, and more
positions are nodes of these rows' trees, each with a path of 15 tokens.

    python benchmarks/gpu_pick.py --out benchmarks/results/h200-pick.json

Needs PyTorch and Triton, nothing else; a minute or two. What does not begin within `--seconds` is left out
and listed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from paceline.bench.machine import Json, machine, source, versions
from paceline.cli.workbench import command_line
from paceline.core.request import SamplingParams
from paceline.sample.device import choose_by_kernels
from paceline.sample.options import SamplingTable
from paceline.sample.sampler import CHUNK, Chooser, PickNodes, choose, pick_by

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

_PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
_BIAS = dict.fromkeys(range(16), 0.5)
EDITS = {
    "penalties": SamplingParams(**_PENALTIES),
    "bias of 16 tokens": SamplingParams(logit_bias=_BIAS),
    "16 banned tokens": SamplingParams(banned_token_ids=range(16)),
    "penalties and bias": SamplingParams(**_PENALTIES, logit_bias=_BIAS),
}
SLOTS = 16  # rows that may have these at the same time, as in the engine
PATH = 15  # tokens of a node's path


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


def table_of(params: list[SamplingParams], rows: int, size: int, slots: int = 0) -> SamplingTable:
    """`rows` rows that take the options in turn; `slots`: how many may have penalties, bias or masks."""
    table = SamplingTable(rows, size, CUDA, slots)
    for row in range(rows):
        table.assign(
            row,
            params[row % len(params)],
            seed=row,
            sample_index=0,
            prompt_ids=[1],
            output_ids=range(100, 200) if slots else [],
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


def tree_nodes(positions: int, rows: int, size: int) -> PickNodes:
    """So many positions, of which the rows have as many each."""
    ids = torch.arange(positions, device=CUDA)
    return PickNodes(
        rows=ids % rows,
        positions=ids // rows + 200,
        num_output=ids // rows + 100,
        path_tokens=torch.randint(size, (positions, PATH), device=CUDA),
        allowed=None,
        host_rows=range(rows),
    )


def measure(
    chooser: Chooser,
    logits: Tensor,
    table: SamplingTable,
    chunk: int,
    repeats: int,
    nodes: PickNodes,
) -> tuple[float, Tensor]:
    """Seconds of one pick of all rows, and its tokens."""

    def call() -> Tensor:
        return pick_by(chooser, logits, lambda x: x, nodes, table, chunk).tokens

    tokens = call()
    graph = graph_of(call)
    return seconds(graph.replay, repeats), tokens


def read_bandwidth(repeats: int) -> float:
    """Bytes a second of the better of two ways to read 4 GB."""
    data = torch.empty(1 << 30, dtype=torch.float32, device=CUDA).normal_()
    return data.nbytes / min(seconds(f, repeats) for f in (data.sum, data.amax))


class Session:
    """What was measured, and the time that there is."""

    def __init__(self, args: argparse.Namespace, read: float) -> None:
        self.args, self.read = args, read
        self.began = time.perf_counter()
        self.lines: list[Json] = []
        self.left_out: list[Json] = []

    def has_time(self, name: str) -> bool:
        """Whether one more case may begin; else it is listed."""
        if time.perf_counter() - self.began <= self.args.seconds:
            return True
        self.left_out.append(name)
        return False


def compare(session: Session, kind: str) -> None:
    """Kernels and definition for every mix of options."""
    args, read = session.args, session.read
    print(
        "logits  options                           rows    us  reads   torch us  x faster  differ"
    )
    for name, params in OPTIONS.items():
        for rows in args.rows:
            if not session.has_time(f"{kind}, {name}, {rows} rows"):
                continue
            logits = logits_of(kind, rows, args.vocabulary)
            table = table_of(params, rows, args.vocabulary)
            nodes = nodes_of(rows)
            took, tokens = measure(choose_by_kernels, logits, table, rows, args.repeats, nodes)
            torch_took, want = measure(choose, logits, table, CHUNK, 5, nodes)
            differ = int((tokens != want).sum())
            reads = took * read / logits.nbytes
            print(
                f"{kind:7} {name:32} {rows:5} {took * 1e6:6.0f} {reads:6.1f} "
                f"{torch_took * 1e6:10.0f} {torch_took / took:8.1f} {differ:7}",
                flush=True,
            )
            session.lines.append(
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


def edits(session: Session, kind: str) -> None:
    """A pick with penalties, bias or masks, as it is served, beside one without."""
    args, read = session.args, session.read
    print(
        "logits  at temperature 1 with             rows    us  reads without us    x more  differ"
    )
    for name, params in EDITS.items():
        for count in args.edited_rows:
            if not session.has_time(f"{kind}, {name}, {count} rows"):
                continue
            logits, rows = logits_of(kind, count, args.vocabulary), min(count, SLOTS)
            nodes = tree_nodes(count, rows, args.vocabulary)
            table = table_of([params], rows, args.vocabulary, SLOTS)
            took, tokens = measure(choose_by_kernels, logits, table, CHUNK, args.repeats, nodes)
            _, want = measure(choose, logits, table, CHUNK, 1, nodes)
            differ = int((tokens != want).sum())
            plain = table_of([SamplingParams()], rows, args.vocabulary)
            without, _ = measure(choose_by_kernels, logits, plain, count, args.repeats, nodes)
            reads = took * read / logits.nbytes
            print(
                f"{kind:7} {name:32} {count:5} {took * 1e6:6.0f} {reads:6.1f} "
                f"{without * 1e6:10.0f} {took / without:8.1f} {differ:7}",
                flush=True,
            )
            session.lines.append(
                {
                    "logits": kind,
                    "options": f"temperature 1, {name}",
                    "rows": count,
                    "rows_with_options": rows,
                    "us": took * 1e6,
                    "without_us": without * 1e6,
                    "reads_of_the_logits": reads,
                    "tokens_that_differ": differ,
                }
            )
            del logits, table, plain
            torch.cuda.empty_cache()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file of the JSON record")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 512, 1024])
    parser.add_argument(
        "--edited-rows",
        nargs="*",
        type=int,
        default=[1, 64, 1024],
        help="with penalties, bias and masks",
    )
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--logits", nargs="+", choices=("steep", "flat"), default=["steep", "flat"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=150, help="after which no case begins")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("these kernels need an NVIDIA GPU, and PyTorch finds none; run it on one")
    torch.manual_seed(0)
    session = Session(args, read_bandwidth(args.repeats))
    torch.cuda.empty_cache()
    print(f"read {session.read / 1e12:.2f} TB/s")
    for i, kind in enumerate(args.logits):
        compare(session, kind)
        if i == 0:  # these passes cost what they cost, whatever the logits are
            edits(session, kind)
    record: dict[str, Json] = {
        "schema": "paceline-pick/1",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "benchmarks/gpu_pick.py", *command_line()[1:]],
        "machine": machine(CUDA),
        "source": source(),
        "versions": versions() | {"triton": __import__("triton").__version__},
        "vocabulary": args.vocabulary,
        "bandwidth": {"read": session.read},
        "seconds": round(time.perf_counter() - session.began, 1),
        "left_out": session.left_out,
        "lines": session.lines,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
