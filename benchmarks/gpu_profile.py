r"""Profiles decode steps on a GPU: which kernels a step launches, how long each takes, and when none runs.

What it answers: kernels of a step with their microseconds, largest first, and the share of the time in
which nothing runs on the GPU: between two steps, where it waits for the host or for the next launch, and
within a step, between one kernel's end and the next one's start. A step is a graph replay; kernels of one
replay share an id in the trace. Kernels may overlap (programmatic dependent launch), so `busy` is the time
in which at least one runs, and sums of kernels can be larger.

    python benchmarks/gpu_profile.py --out benchmarks/results/h200-profile.json

Profiled steps are slower than measured ones. So `ms_per_step` is measured without the profiler by the
host's clock, and once more with events before and after each replay, which say how long the GPU took
for a graph and from one graph's end to the next one's start (copies included), undisturbed by a trace.

A case is DRAFTER@SEQUENCES, as for `paceline bench steps`; weights are random. Under a minute.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.bench.machine import Json, machine, source, versions
from paceline.bench.step_batch import Batch
from paceline.bench.step_cases import Case, Spec, cases_of, find_shape, parse_spec
from paceline.bench.steps import Bench, Settings
from paceline.cli.workbench import command_line
from paceline.core.config import CacheConfig, EngineConfig
from paceline.core.errors import PacelineError
from paceline.engine.engine import Engine
from paceline.engine.graphs import Recorded
from paceline.engine.step_tensors import StepTensors

CASES = ("none@1", "none@64", "dflash:qwen3-8b-dflash-b16@8")
SEED = 0
_NAME = 80  # letters of a kernel's


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that ran on the GPU: nanoseconds."""

    name: str
    start: int
    stop: int
    launch: int  # the same for all of a graph's replay


def pieces_of(trace: Any) -> list[Piece]:
    """What ran on the GPU, in order of its start."""
    events = (e for e in trace.profiler.kineto_results.events() if "CUDA" in str(e.device_type()))
    found = [Piece(e.name(), e.start_ns(), e.end_ns(), e.correlation_id()) for e in events]
    return sorted((p for p in found if p.stop > p.start), key=lambda p: p.start)


def covered(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """Spans in which at least one of them runs; they come in order of their start."""
    spans: list[tuple[int, int]] = []
    for piece in pieces:
        if spans and piece.start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], piece.stop)
        else:
            spans.append((piece.start, piece.stop))
    return spans


def overlap(spans: Iterable[tuple[int, int]], start: int, stop: int) -> int:
    """Nanoseconds of [start, stop) that the spans cover."""
    return sum(max(0, min(b, stop) - max(a, start)) for a, b in spans)


def idle(pieces: Sequence[Piece], steps: int) -> dict[str, Json]:
    """When nothing runs, from the first replay's start to the last one's."""
    launches = collections.defaultdict[int, list[Piece]](list)
    for piece in pieces:
        launches[piece.launch].append(piece)
    # Copies around a replay have a launch each.
    whole = sorted(launches.values(), key=len)[-steps:]
    replays = sorted((min(p.start for p in one), max(p.stop for p in one)) for one in whole)
    if len(whole) < steps or len(whole[0]) < 2:
        return {"why_not": f"{len(launches)} launches for {steps} steps: replays cannot be told"}
    begin, end = replays[0][0], replays[-1][0]
    if end <= begin:
        return {"why_not": "one replay alone"}
    spans, period = covered(pieces), end - begin
    busy = overlap(spans, begin, end)
    within = sum(b - a - overlap(spans, a, b) for a, b in replays[:-1])
    gaps = [(a[1], b[0]) for a, b in pairwise(replays)]
    between = sum(max(0, b - a) - overlap(spans, a, b) for a, b in gaps)
    copies = covered(p for p in pieces if p.name.startswith(("Memcpy", "Memset")))
    count = len(replays) - 1
    return {
        "span_ms": period / 1e6 / count,
        "busy_ms": busy / 1e6 / count,
        "idle_share": 1 - busy / period,
        "idle_share_within_steps": within / period,
        "idle_share_between_steps": between / period,
        "median_between_steps_us": statistics.median(b - a for a, b in gaps) / 1e3,
        "copies_and_fills_ms": overlap(copies, begin, end) / 1e6 / count,
    }


def kernels(pieces: Sequence[Piece], steps: int) -> list[Json]:
    """A line for each kernel of a step, largest first."""
    total, calls = collections.Counter[str](), collections.Counter[str]()
    for piece in pieces:
        total[piece.name] += piece.stop - piece.start
        calls[piece.name] += 1
    return [
        {"name": name[:_NAME], "us": round(ns / 1e3 / steps, 1), "calls": calls[name] / steps}
        for name, ns in total.most_common()
    ]


@dataclass(slots=True)
class Timed:
    """A recorded step between two events."""

    step: Recorded
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """See `Recorded`."""
        return self.step.nbytes

    def replay(self) -> StepTensors:
        """See `Recorded`."""
        before, after = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        before.record()
        found = self.step.replay()
        after.record()
        self.events.append((before, after))
        return found


def by_events(engine: Engine, batch: Batch, steps: int) -> dict[str, Json]:
    """What the GPU takes for a graph, and from its end to the next one's start; medians."""
    graphs = engine._launcher.graphs  # noqa: SLF001 (replays are to be watched)
    assert graphs is not None, "there are graphs on a GPU"
    made = graphs._graphs  # noqa: SLF001 (the same)
    watched = {key: Timed(step) for key, step in made.items()}
    before = dict(made)
    made.update(watched)
    try:
        batch.steps(steps)
    finally:
        made.update(before)
    torch.cuda.synchronize()
    events = next(one.events for one in watched.values() if one.events)
    took = [a.elapsed_time(b) for a, b in events]
    between = [a[1].elapsed_time(b[0]) for a, b in pairwise(events)]
    return {
        "median_graph_ms": statistics.median(took),
        "median_between_us": 1e3 * statistics.median(between),
        "between_share": sum(between) / (sum(between) + sum(took)),
    }


def measure(bench: Bench, spec: Spec, case: Case, args: argparse.Namespace) -> dict[str, Json]:
    """A case's profile."""
    on_gpu = bench.device.type == "cuda"
    settings = Settings(steps=4 * args.steps, warmup=args.warmup, stage_steps=0)
    with bench.engine(spec, [case], settings) as engine:
        batch = Batch(engine, case, SEED)
        batch.prefill()
        batch.start()
        batch.steps(args.warmup)  # captures
        batch.stop()
        batch.start()
        batch.steps(args.warmup)
        seconds, _ = batch.steps(args.steps)
        watched = by_events(engine, batch, args.steps) if on_gpu else {}
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        with profile(activities=[activity]) as trace:
            batch.steps(args.steps)
            if on_gpu:
                torch.cuda.synchronize()
        batch.stop()
    pieces = pieces_of(trace)
    lines = kernels(pieces, args.steps)
    return {
        "spec": spec.name,
        "sequences": case.sequences,
        "context": case.context,
        "ms_per_step": round(1e3 * seconds / args.steps, 3),
        "by_events": watched,
        "idle": idle(pieces, args.steps),
        "num_kernels": round(len(pieces) / args.steps),
        "sum_of_kernels_ms": round(sum(p.stop - p.start for p in pieces) / 1e6 / args.steps, 3),
        "kernels": lines[: args.kernels],
    }


def arguments() -> argparse.Namespace:
    """What was asked for; cases are read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", help="a shape's name, or a folder")
    parser.add_argument("--case", nargs="+", default=list(CASES), help="DRAFTER@SEQUENCES")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=12, help="that are profiled")
    parser.add_argument("--warmup", type=int, default=8, help="steps before them")
    parser.add_argument("--kernels", type=int, default=26, help="lines of a profile, at most")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="file of the JSON record")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("profiles of kernels need an NVIDIA GPU, and PyTorch finds none")
    if min(args.context, args.steps, args.warmup, args.kernels) < 1:
        parser.error("--context, --steps, --warmup and --kernels are 1 or more")
    args.folder = find_shape(args.model)
    if args.folder is None:
        parser.error(f"--model {args.model}: no shape and no folder with a config.json; give one")
    try:
        words = [text.rpartition("@") for text in args.case]
        args.cases = [
            (parse_spec(name), cases_of([], [], [f"{count}x{args.context}"])[0])
            for name, _, count in words
        ]
    except PacelineError as error:
        parser.error(str(error))
    return args


def main() -> int:
    """Run it."""
    args, began = arguments(), time.perf_counter()
    bench = Bench(
        EngineConfig(
            model=str(args.folder),
            device=args.device,
            weights="bf16",
            seed=SEED,
            cache=CacheConfig(chunk_size=2048),  # so that all sequences start at once
        ),
        random_weights=SEED,
    )
    profiles: list[Json] = []
    record: dict[str, Json] = {
        "schema": "paceline-profiles/2",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "benchmarks/gpu_profile.py", *command_line()[1:]],
        "versions": versions(),
        "source": source(),
        "machine": machine(bench.device),
        "what": "GPU kernels of one decode step by torch.profiler, largest first; random weights; "
        "profiled steps are slower than measured ones",
        "model": args.model,
        "profiles": profiles,
    }
    for spec, case in args.cases:
        found = measure(bench, spec, case, args)
        profiles.append(found)
        record["seconds"] = round(time.perf_counter() - began, 1)
        if args.out is not None:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(record, indent=1, allow_nan=False)
            args.out.write_text(text + "\n", encoding="utf-8")
        said = {k: found[k] for k in ("spec", "sequences", "ms_per_step", "by_events", "idle")}
        print(json.dumps(said), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
