r"""Compares what `paceline widen` wrote with the model that it was made of: texts and accept lengths.

The function is the same, but a wide product orders its sums otherwise, so in floating point a near-tie
may go the other way. For every answer that differs the record says where, and how far apart the two best
tokens of the small model were there; after that place the texts are different ones.

    python benchmarks/widened.py wide --make --device cuda --dtype bfloat16 \
        --out benchmarks/results/widened-8b.json

`--make` writes the folder first, at the default sizes, as `paceline widen wide` does.

One JSON record is the last line of stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import torch

from paceline import LLM, SamplingParams
from paceline.api.results import Result
from paceline.api.widen import plan_widening
from paceline.bench import workload
from paceline.bench.machine import machine, source, versions
from paceline.bench.summary import common_length
from paceline.bench.widen_files import FACTS
from paceline.cli.workbench import command_line, publish
from paceline.core.device import choose_device
from paceline.core.errors import PacelineError
from paceline.draft.dflash_config import FIRST, SECOND

HERE = Path(__file__).parent
Row: TypeAlias = dict[str, object]


def make(args: argparse.Namespace) -> float:
    """Write the folder; returns the seconds that it took."""
    drafters = [str(folder) for folder in args.drafter or ()]
    begin = time.perf_counter()
    planned = plan_widening(model=args.model, drafters=drafters, dtype=args.dtype)
    planned.write(
        args.folder,
        shard_bytes=5_000_000_000,
        progress=lambda _, __: None,
        device=choose_device(args.device),
    )
    return round(time.perf_counter() - begin, 1)


def ways(root: Path, small: Sequence[Path]) -> list[tuple[str, Path | None, Path | None]]:
    """Every drafter that was widened: method, folder beside the small model, folder in `root`."""
    found: list[tuple[str, Path | None, Path | None]] = [("none", None, None)]
    for folder in small:
        names = json.loads((root / folder.name / "config.json").read_text())["architectures"]
        method = "ddtree" if {FIRST, SECOND} & set(names) else "eagle3"
        found.append((method, folder, root / folder.name))
    return found


def answers(
    args: argparse.Namespace, model: str, method: str, folder: Path | None, prompts: Sequence[str]
) -> tuple[list[Result], float]:
    """Greedy answers, with the two best tokens of every place, and the seconds that they took."""
    options: dict[str, object] = {
        "device": args.device,
        "dtype": args.dtype,
        "weights": "bf16",  # unpacked, on a CPU too
        "max_len": args.max_len,
        "max_rows": args.rows,
        "seed": 0,
        "spec": method,
        "adaptive": False,
    }
    if folder is not None:
        options |= {"spec_model": str(folder), "spec_weights": "bf16", "spec_check": "off"}
        options["spec_nodes"] = args.nodes
    llm = LLM(model, **options)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, logprobs=2)
    begin = time.perf_counter()
    chats = [[{"role": "user", "content": text}] for text in prompts]
    found = llm.chat(chats, params)
    seconds = time.perf_counter() - begin
    llm.close()
    return found, seconds


def accept_length(found: Sequence[Result]) -> float:
    """Tokens per target step, bonus included, over all steps."""
    steps = sum(result.stats.num_steps for result in found)
    return round(1 + sum(result.stats.num_accepted for result in found) / max(steps, 1), 3)


def first_difference(one: Result, other: Result) -> Row | None:
    """Where two answers part, and how clear the small model's choice was there; None: nowhere."""
    if one.token_ids == other.token_ids:
        return None
    place = common_length(one.token_ids, other.token_ids)
    if place == min(len(one.token_ids), len(other.token_ids)):
        return {"place": place, "margin_nats": None}
    assert one.logprobs is not None, "they were asked for"
    best, second = one.logprobs[place].top[:2]
    return {"place": place, "margin_nats": round(best.logprob - second.logprob, 4)}


def compare(small: Sequence[Result], wide: Sequence[Result]) -> Row:
    """One row of the record."""
    parted = [first_difference(a, b) for a, b in zip(small, wide, strict=True)]
    return {
        "answers": len(small),
        "equal": sum(found is None for found in parted),
        "tokens": sum(len(result.token_ids) for result in small),
        "differences": [found for found in parted if found is not None],
        "accept_length_small": accept_length(small),
        "accept_length_wide": accept_length(wide),
        "accept_lengths_equal": sum(
            a.stats.accept_histogram == b.stats.accept_histogram
            for a, b in zip(small, wide, strict=True)
        ),
    }


def median_margin(found: Sequence[Result]) -> float:
    """How far apart the two best tokens are in a middling place, nats."""
    margins = [
        place.top[0].logprob - place.top[1].logprob
        for result in found
        for place in result.logprobs or ()
    ]
    return round(statistics.median(margins), 3)


def main() -> int:
    """Run all drafters over both models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what `paceline widen` wrote")
    parser.add_argument("--make", action="store_true", help="write it first, in --dtype")
    parser.add_argument("--model", default="default", help="what it was made of")
    parser.add_argument(
        "--drafter", type=Path, action="append", help="as for `paceline widen`; default: ours"
    )
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts" / "spec_bench.jsonl")
    parser.add_argument("--category", nargs="*", default=(), help="only these groups")
    parser.add_argument("--limit", type=int, default=1, help="prompts of each group")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1, help="prompts at a time")
    parser.add_argument("--nodes", type=int, default=16, help="draft nodes of a step")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        choose_device(args.device)
        made_s = make(args) if args.make else None
        prompts = workload.load([args.prompts], categories=args.category, limit=args.limit)
    except PacelineError as error:
        parser.error(str(error))
    if not (args.folder / FACTS).is_file():
        parser.error(
            f"there is no widened model in {args.folder}; add --make, or run `paceline widen` first"
        )
    shipped = HERE.parent / "drafters"
    drafters = args.drafter or [
        p for p in sorted(shipped.iterdir()) if (p / "config.json").exists()
    ]
    drafters = [p for p in drafters if (args.folder / p.name).is_dir()]
    texts = [p.messages[0]["content"] if p.messages else p.text for p in prompts.prompts]
    rows: list[Row] = []
    for method, before, after in ways(args.folder, drafters):
        small, small_s = answers(args, args.model, method, before, texts)
        wide, wide_s = answers(args, str(args.folder / "target"), method, after, texts)
        row = {"drafter": method, **compare(small, wide)}
        row |= {"median_margin_nats": median_margin(small)}
        row |= {"seconds_small": round(small_s, 1), "seconds_wide": round(wide_s, 1)}
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    record: Row = {
        "schema": "paceline-widened/1",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "benchmarks/widened.py", *command_line()[1:]],
        "versions": versions(),
        "source": source(),
        "machine": machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "widened": json.loads((args.folder / FACTS).read_text(encoding="utf-8")),
        "seconds_to_write": made_s,
        "dtype": args.dtype,
        "prompts": {"digest": prompts.digest, "count": len(texts), "max_tokens": args.max_tokens},
        "nodes": args.nodes,
        "rows": rows,
    }
    publish(record, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
