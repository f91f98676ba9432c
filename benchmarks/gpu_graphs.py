r"""Captures the usual graphs of a model's engine beforehand, as a start does: how many, how long, how much memory.

What it answers: whether the graphs of an 8 B model are captured within a minute, and whether weights, KV
pool and graphs then stay within the memory that was stated, also under load. For every case an engine is
built with the defaults over random weights; then as many sequences as it has rows are prefilled and
decode some steps. Three sums stand beside the stated memory: what PyTorch's allocator holds, the most that
it held under load, and what the device lacks since before the weights were made: libraries' and kernels'
own memory included, the CUDA context not.

    python benchmarks/gpu_graphs.py --out benchmarks/results/h200-graphs.json

A case is DRAFTER@MEMORY: none, suffix, dflash:CONFIG or ddtree:CONFIG, and GB, or "default", which is 90 %
of what is free when the weights are there. Kernels that are nowhere cached are compiled in the first cases
that use them. What begins after `--seconds` is left out and listed; the record is written after each case.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from paceline.bench.machine import Json, machine, source, versions
from paceline.bench.step_batch import Batch
from paceline.bench.step_cases import Case, find_shape
from paceline.bench.steps import Bench, random_network
from paceline.cli.workbench import command_line
from paceline.core.config import CacheConfig, DraftConfig, EngineConfig
from paceline.core.device import (
    TORCH_DTYPES,
    forget_peak,
    free_memory,
    give_back,
    peak_memory,
    used_memory,
)
from paceline.core.errors import PacelineError
from paceline.engine.engine import Engine
from paceline.kv.layout import Heads

CASES = (
    "ddtree:qwen3-8b-dflash-b16@default",
    "none@60",
    "dflash:qwen3-8b-dflash-b16@60",
    "suffix@default",
)
MOST_SECONDS = 60.0  # of capturing
SHARE = 0.9  # of the free memory, where no number is stated
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A drafter and the memory that is stated."""

    name: str
    draft: DraftConfig
    memory_gb: float | None


def case_of(text: str) -> Asked:
    """Read DRAFTER@MEMORY.

    Raises:
        ValueError: it has another form, or names no configuration.
    """
    name, _, memory = text.rpartition("@")
    method, _, shape = name.partition(":")
    folder = find_shape(shape) if shape else None
    if not method or (shape and folder is None):
        msg = (
            f"{text!r} is no case; DRAFTER@MEMORY is, with none, suffix, dflash:CONFIG or ddtree:CONFIG "
            "and GB or default. Give one like none@60"
        )
        raise ValueError(msg)
    return Asked(
        name=name,
        draft=DraftConfig(
            method=method, model=None if folder is None else str(folder), check="off"
        ),
        memory_gb=None if memory == "default" else float(memory),
    )


class Meter:
    """What the device lacks since it was made; the CUDA context is there by then."""

    def __init__(self, device: torch.device) -> None:
        torch.zeros(1, device=device)
        give_back(device)
        self._device, self._before = device, free_memory(device)

    @property
    def taken(self) -> int:
        """Bytes."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return self._before - free_memory(self._device)


def pools(engine: Engine) -> int:
    """Bytes of keys and values, target and drafter."""
    cache, config, spec = engine.config.cache, engine.model_config, engine.spec
    dtype = TORCH_DTYPES[engine.config.dtype]
    a_token = Heads(config.num_kv_heads, config.head_dim).token_nbytes(config.num_layers, dtype)
    if spec.kv is not None:
        own = Heads(spec.kv.num_kv_heads, spec.kv.head_dim)
        a_token += own.token_nbytes(spec.kv.num_layers, dtype)
    return a_token * cache.page_size * ((cache.num_pages or 0) + 1)


def load(engine: Engine, context: int, steps: int, meter: Meter) -> dict[str, Json]:
    """All rows prefilled and decoding: the most memory, and steps that had no graph ready."""
    before, most = engine.report(), 0
    batch = Batch(engine, Case(sequences=engine.config.cache.max_rows, context=context), SEED)
    batch.prefill()
    most = max(most, meter.taken)
    batch.start()
    seconds, _ = batch.steps(steps)
    most = max(most, meter.taken)
    batch.stop()
    after = engine.report()
    return {
        "ms_per_step": round(1e3 * seconds / steps, 3),
        "most_device_bytes": most,
        "most_allocated_bytes": peak_memory(torch.device(engine.config.device)),
        "steps_without_graph": int(
            after["num_steps_without_graph"] - before["num_steps_without_graph"]
        ),
        "graphs_captured_under_load": int(after["num_graphs"] - before["num_graphs"]),
    }


def measure(bench: Bench, asked: Asked, meter: Meter, args: argparse.Namespace) -> dict[str, Json]:
    """One case's row."""
    device = bench.device
    give_back(device)
    free, held = free_memory(device), used_memory(device)
    stated = free * SHARE + held if asked.memory_gb is None else asked.memory_gb * 1e9
    config = EngineConfig(
        model=bench.config.model,
        device=str(device),
        dtype=bench.config.dtype,
        weights="bf16",
        seed=SEED,
        graphs="beforehand",
        cache=CacheConfig(max_rows=args.rows, memory_gb=asked.memory_gb),
        draft=asked.draft,
    )
    began = time.perf_counter()
    engine = Engine.build(config, loaded=bench.loaded, make_network=random_network(SEED))
    built = time.perf_counter() - began
    graphs = engine._launcher.graphs  # noqa: SLF001 (what a report does not say)
    report = engine.report()
    usual = [] if graphs is None else graphs.ladder.usual(graphs.kinds)
    row: dict[str, Json] = {
        "drafter": asked.name,
        "nodes": engine.spec.max_nodes,
        "rows": args.rows,
        "memory_gb": asked.memory_gb,
        "stated_bytes": int(stated),
        "usual_graphs": len(usual),
        "graphs": int(report["num_graphs"]),
        "trees": [] if graphs is None else [kind.value for kind in graphs.kinds],
        "capture_seconds": round(report["graph_seconds"], 2),
        "build_seconds": round(built, 2),
        "graph_bytes": int(report["graph_bytes"]),
        "set_aside_bytes": None if graphs is None else graphs.set_aside,
        "weight_bytes": held,
        "pool_bytes": pools(engine),
        "pages": engine.config.cache.num_pages,
        "allocated_bytes": used_memory(device),
        "device_bytes": meter.taken,
    }
    forget_peak(device)
    try:
        under = load(engine, args.context, args.steps, meter)
    finally:
        engine.close()
    row["under_load"] = under
    row["notes"] = [note for note in engine.notes if note.startswith(("KV pool", "CUDA graphs"))]
    most = max(int(str(row["device_bytes"])), int(str(under["most_device_bytes"])))
    row["bars"] = {
        "all_usual_captured": len(usual) == row["graphs"],
        "captured_within_seconds": MOST_SECONDS,
        "captured_in_time": report["graph_seconds"] <= MOST_SECONDS,
        "device_over_stated": round(most / stated, 4),
        "within_stated": most <= stated,
    }
    return row


def arguments() -> argparse.Namespace:
    """What was asked for; cases are read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", help="a shape's name, or a folder")
    parser.add_argument("--case", nargs="+", default=list(CASES), help="DRAFTER@MEMORY, in order")
    parser.add_argument("--rows", type=int, default=16, help="that decode together; the default's")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each, under load")
    parser.add_argument("--steps", type=int, default=16, help="of the load")
    parser.add_argument("--seconds", type=float, default=120, help="after which no case begins")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="file of the JSON record")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("graphs need an NVIDIA GPU, and PyTorch finds none; run it on one")
    args.folder = find_shape(args.model)
    if args.folder is None:
        parser.error(f"--model {args.model}: no shape and no folder with a config.json; give one")
    try:
        args.cases = [case_of(text) for text in args.case]
    except ValueError as error:
        parser.error(str(error))
    return args


def keep(record: dict[str, Json], out: Path | None) -> None:
    """Write what there is so far."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def main() -> int:
    """Run it."""
    args, began = arguments(), time.perf_counter()
    device = torch.device(args.device)
    meter = Meter(device)
    bench = Bench(
        EngineConfig(model=str(args.folder), device=args.device, weights="bf16", seed=SEED),
        random_weights=SEED,
    )
    rows: list[Json] = []
    left_out: list[Json] = []
    record: dict[str, Json] = {
        "schema": "paceline-graphs/1",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "benchmarks/gpu_graphs.py", *command_line()[1:]],
        "versions": versions(),
        "source": source(),
        "machine": machine(device),
        "what": "engines of random weights with the defaults, usual graphs captured beforehand; "
        "bytes; weights are the target's",
        "model": args.model,
        "load": {"context": args.context, "steps": args.steps},
        "rows": rows,
        "left_out": left_out,
    }
    for text, asked in zip(args.case, args.cases, strict=True):
        spent = time.perf_counter() - began
        if spent > args.seconds:
            left_out.append(f"{text}: no time")
            continue
        print(f"{spent:6.1f} s  {text}", file=sys.stderr, flush=True)
        try:
            row = measure(bench, asked, meter, args)
        except (PacelineError, torch.OutOfMemoryError) as error:
            left_out.append(f"{text}: {error}")
            print(f"          {error}", file=sys.stderr, flush=True)
            continue
        finally:
            record["seconds"] = round(time.perf_counter() - began, 1)
            keep(record, args.out)
        rows.append(row)
        keep(record, args.out)
        print(json.dumps({k: row[k] for k in ("graphs", "capture_seconds", "bars")}), flush=True)
    record["seconds"] = round(time.perf_counter() - began, 1)
    keep(record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
