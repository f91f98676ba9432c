"""Measures how many tokens a step of the bundled model's drafters emits: `make bench-accept`.

Each part writes into one record as soon as it has something, with where it was measured:

accept  accept length by drafter, nodes, data set, group and temperature, with everything that is
        proposed verified, many prompts at once. On a GPU the full sets take minutes:
            python benchmarks/accept.py accept --device cuda --rows 128 \
                --spec-bench question.jsonl --human-eval HumanEval.jsonl.gz --gsm8k test.jsonl
entropy the model's entropy a token at temperature 1, without which sampled figures say little.
speed   as served: one sequence at a time, the policy chooses how many nodes are verified, and the
        autoregressive baseline runs beside it, prompt by prompt; ten prompts of each group.
join    nothing is measured: rows of the records named by --records, made side by side, are put in.
table   nothing is measured: the record's tables are written into docs/acceptance.md.

Without paths the prompts of this folder are used (60 of Spec-Bench, 40 of HumanEval). Rows measured
again replace the old ones; the others stay.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import accept_tables
import torch

from paceline import models
from paceline.api.options import engine_config
from paceline.api.tokenizer import Tokenizer
from paceline.bench import workload
from paceline.bench.accept import acceptance, entropy
from paceline.bench.machine import machine, source, versions
from paceline.bench.run import Settings, Task, run
from paceline.bench.summary import differences, summarise
from paceline.cli.workbench import encode
from paceline.engine.engine import Engine
from paceline.models import LoadedModel

HERE = Path(__file__).parent
INDEX = HERE.parent / "drafters" / "index.json"
SETS = {
    "spec_bench": "spec_bench.jsonl",
    "human_eval": "human_eval.jsonl",
    "gsm8k": None,
    "copy": "copy.jsonl",
}
KEYS = (
    *("drafter", "parts", "noise", "nodes", "dataset", "group", "temperature", "device"),
    *("dtype", "weights", "max_tokens", "adaptive"),
)
DRAFTERS = (
    '{"method": "dflash", "num_speculative_tokens": 7}',
    '{"method": "ddtree", "num_speculative_tokens": 16}',
    '{"method": "ddtree", "num_speculative_tokens": 32}',
    '{"method": "eagle3", "num_speculative_tokens": 4, "eagle_num_steps": 4}',
    '{"method": "suffix", "num_speculative_tokens": 32}',
)
Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A drafter with its settings."""

    name: str  # registry name
    nodes: int
    config: dict[str, object]  # vLLM's keys


def ways(texts: Sequence[str]) -> list[Way]:
    """Drafters from JSON objects of `--speculative-config`'s shape."""
    found = []
    for text in texts:
        config = json.loads(text)
        nodes = int(config.get("num_speculative_tokens", 0))
        found.append(Way(name=config["method"], nodes=nodes, config=config))
    return found


def engine_of(args: argparse.Namespace, way: Way, loaded: LoadedModel | None) -> Engine:
    """An engine with this drafter."""
    values: dict[str, object] = {
        "model": args.model,
        "device": args.device,
        "weights": args.weights,
        "seed": 0,
        "max_rows": args.rows,
        "max_len": args.max_len,
        "adaptive": args.part == "speed",
        "speculative_config": json.dumps(way.config),
    }
    if args.dtype:
        values["dtype"] = args.dtype
    engine = Engine.build(engine_config(values), loaded=loaded)
    if args.without_noise:
        runtime = engine._proposer._drafter._block._runtime  # type: ignore[attr-defined]  # noqa: SLF001
        runtime.noise = lambda rows, positions, ids: torch.zeros_like(ids, dtype=torch.float32)  # noqa: ARG005
    return engine


def data_sets(args: argparse.Namespace, tokens: Tokenizer) -> Iterator[tuple[str, list[Task]]]:
    """Name and tasks of each data set that is asked for and there."""
    for name, own in SETS.items():
        path = getattr(args, name) or (HERE / "prompts" / own if own else None)
        if path is None or name not in args.sets:
            continue
        yield name, encode(workload.load([path], limit=args.limit), tokens)


def measure_accept(args: argparse.Namespace, tokens: Tokenizer) -> Iterator[list[Row]]:
    """Rows of accept lengths: one list for each drafter, data set and temperature."""
    for way, engine in engines(args):
        for dataset, tasks in data_sets(args, tokens):
            for heat in args.temperatures:
                settings = Settings(
                    max_tokens=args.max_tokens, temperature=heat, concurrency=args.rows
                )
                started = time.perf_counter()
                found = acceptance(engine, tasks, settings, stop_ids=stop_ids(tokens, engine))
                rows = [
                    row(args, engine, way, dataset, group.group, heat)
                    | {
                        "accept_length": round(group.accept_length, 4),
                        "speed_ratio": None,
                        "prompts": group.num_prompts,
                        "steps": group.num_steps,
                        "position_rates": [round(r, 4) for r in group.position_rates],
                    }
                    for group in found
                ]
                say(rows[-1], time.perf_counter() - started)
                yield rows


def measure_entropy(args: argparse.Namespace, tokens: Tokenizer) -> Row:
    """The target's entropy a token at temperature 1, nats, by data set and group."""
    engine = engine_of(args, ways(['{"method": "none"}'])[0], None)
    found: Row = {}
    for dataset, tasks in data_sets(args, tokens):
        settings = Settings(max_tokens=args.max_tokens, concurrency=args.rows)
        nats = entropy(engine, tasks, settings, stop_ids=stop_ids(tokens, engine))
        found[dataset] = {group: round(value, 4) for group, value in nats.items()}
    engine.close()
    return found


def measure_speed(args: argparse.Namespace, tokens: Tokenizer) -> Iterator[list[Row]]:
    """Rows of speed ratios, one sequence at a time, the baseline beside it."""
    for way, engine in engines(args):
        for dataset, tasks in data_sets(args, tokens):
            for heat in args.temperatures:
                settings = Settings(max_tokens=args.max_tokens, temperature=heat)
                started = time.perf_counter()
                slices = run(engine, tasks, settings, stop_ids=stop_ids(tokens, engine))
                unequal = len(differences(slices))
                rows = [
                    row(args, engine, way, dataset, group.group, heat)
                    | {
                        "accept_length": round(group.accept_length, 4),
                        "speed_ratio": round(group.speed_ratio, 4),
                        "prompts": group.num_prompts,
                        "steps": group.num_steps,
                        "baseline_tokens_per_second": round(group.baseline_tokens_per_second, 2),
                        "outputs_differ": unequal,
                    }
                    for group in summarise(slices, tasks)
                ]
                say(rows[-1], time.perf_counter() - started)
                yield rows


def engines(args: argparse.Namespace) -> Iterator[tuple[Way, Engine]]:
    """An engine for each drafter, one after the other; they share the target."""
    loaded = None
    for way in ways(args.drafters):
        engine = engine_of(args, way, loaded)
        loaded = engine.loaded
        yield way, engine
        engine.close()


def row(
    args: argparse.Namespace, engine: Engine, way: Way, dataset: str, group: str, heat: float
) -> Row:
    """What was run, without what came out."""
    return {
        "drafter": way.name,
        "parts": way.config.get("parts"),
        "settings": {k: v for k, v in way.config.items() if k.startswith("eagle_")},
        "noise": not args.without_noise,
        "nodes": way.nodes,
        "dataset": dataset,
        "group": group,
        "temperature": heat,
        "device": torch.device(engine.config.device).type,
        "dtype": engine.config.dtype,
        "weights": engine.config.weights,
        "max_tokens": args.max_tokens,
        "adaptive": engine.config.draft.adaptive,
    }


def stop_ids(tokens: Tokenizer, engine: Engine) -> frozenset[int]:
    """Ids that end an answer."""
    return frozenset(tokens.eos_token_ids) | frozenset(engine.model_config.eos_token_ids)


def say(found: Row, seconds: float) -> None:
    """One line for who waits."""
    speed = "" if found["speed_ratio"] is None else f", {found['speed_ratio']} x own AR"
    print(
        f"{found['drafter']:8} {found['nodes']:3} nodes {found['dataset']:10} "
        f"T={found['temperature']} accept {found['accept_length']}{speed} ({seconds:.0f} s)",
        file=sys.stderr,
        flush=True,
    )


def merged(path: Path, rows: list[Row], entropies: Row, part: str, origin: Row) -> Row:
    """The record with these rows in place of older ones of the same meaning."""
    old: dict[str, object] = json.loads(path.read_text()) if path.exists() else {}
    new = {meaning(r) for r in rows}
    kept = [
        r
        for r in old.get("rows", [])  # type: ignore[attr-defined]
        if meaning(r) not in new
    ]
    about = dict(old.get("measured", {}))  # type: ignore[call-overload]
    about[part] = origin
    return {
        "schema": "paceline/accept/1",
        "model": "SmolLM2-135M-Instruct",
        "protocol": "chat template, first turn, end-of-text honoured, weighted by tokens, bonus in",
        "measured": about,
        "entropy_nats_t1": {**old.get("entropy_nats_t1", {}), **entropies},  # type: ignore[dict-item]
        "rows": [*kept, *rows],
    }


def meaning(found: Row) -> tuple[str, ...]:
    """What tells a row from others."""
    return tuple(str(found.get(key, True if key == "noise" else None)) for key in KEYS)


def here() -> Row:
    """The machine, the code and the drafters' weights."""
    return {
        "machine": machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "versions": versions(),
        "source": source(),
        "drafters": {d["folder"]: d["digest"] for d in json.loads(INDEX.read_text())["drafters"]},
    }


def save(path: Path, record: Row) -> None:
    """Write the record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def join(path: Path, records: Sequence[Path]) -> None:
    """Put the rows of other records into this one, in their order."""
    for other in records:
        found = json.loads(other.read_text())
        for part, origin in found["measured"].items():
            save(path, merged(path, found["rows"], found["entropy_nats_t1"], part, origin))


def main() -> None:
    """Measure one part and write it into the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("accept", "entropy", "speed", "join", "table"))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "accept-smollm2.json")
    parser.add_argument(
        "--drafters", nargs="+", default=DRAFTERS, help="JSON objects with vLLM's keys"
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", help="default: the device's")
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--rows", type=int, default=1, help="sequences at the same time (accept)")
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--limit", type=int, help="prompts of each group; speed: 10, accept: all")
    parser.add_argument("--sets", nargs="+", choices=tuple(SETS), default=list(SETS)[:3])
    for name in SETS:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, dest=name, type=Path, help="the full set")
    parser.add_argument(
        "--without-noise",
        action="store_true",
        help="dflash and ddtree rank by their own odds alone, not by the noise that draws the token",
    )
    parser.add_argument("--records", type=Path, nargs="+", default=[], help="join: to put in")
    args = parser.parse_args()
    if args.part == "join":
        join(args.out, args.records)
        return
    if args.part == "table":
        accept_tables.put(HERE.parent / "docs" / "acceptance.md", json.loads(args.out.read_text()))
        return
    if args.part == "speed" and args.limit is None:
        args.limit = 10
    tokens = Tokenizer.from_files(models.resolve(args.model).path)
    record: Row = {}
    if args.part == "entropy":
        record = merged(args.out, [], measure_entropy(args, tokens), args.part, here())
        save(args.out, record)
    else:
        measure = measure_accept if args.part == "accept" else measure_speed
        for rows in measure(args, tokens):
            record = merged(args.out, rows, {}, args.part, here())
            save(args.out, record)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
