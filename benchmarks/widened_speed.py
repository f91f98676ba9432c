r"""Measures throughput on a widened model: what speculation wins where a step costs what an 8 B's does.

    python benchmarks/widened_speed.py /tmp/wide --prompts HumanEval.jsonl.gz --seconds 215 \
        --out benchmarks/results/h200-widened.json

The target is widened on the device and never written; drafters (2.1 GB) go to the folder. Every drafter
then answers prompts greedily, through the chat template, end-of-text honoured: at one sequence, at 8 and
at 64, which answers all prompts. Everything that is drafted is verified. A run in which a graph was captured
is not a figure of service, so it is repeated, three times at most; no run finds anything in the prefix cache.

Beside a row's accept length stand that of the small model with its own drafter over the same prompts
(`accept_length_small`, measured here at the end) and that of `accept-smollm2.json`, where it has the same
settings and prompts. The widened function is the small model's but for the order of sums, so in bfloat16
answers part at near-ties: `differences` says how often, and how far apart the small model's two best tokens
were there.

Graphs are captured when a step first asks for one, since there is no time for all of every drafter. The record is written after every row: whatever ends this leaves what was measured. `--seconds` is for all;
what does not fit any more is listed in `left_out`. One JSON record is the last line of stdout.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import torch

from paceline import models
from paceline.api.options import engine_config
from paceline.api.tokenizer import Tokenizer
from paceline.api.widen import plan_widening
from paceline.bench import workload
from paceline.bench.machine import machine, source, versions
from paceline.bench.run import Sample, Settings, Slice, Task, run_one_way
from paceline.bench.widen_load import load_target
from paceline.cli.workbench import command_line, encode, publish
from paceline.core.device import free_cached
from paceline.draft.dflash_config import FIRST, SECOND
from paceline.engine.engine import Engine
from paceline.models import LoadedModel

HERE = Path(__file__).parent
RECORDED = HERE / "results" / "accept-smollm2.json"
DRAFTERS = (
    '{"method": "none"}',
    '{"method": "ddtree", "num_speculative_tokens": 32}',
    '{"method": "dflash", "num_speculative_tokens": 7}',
    '{"method": "merged", "parts": ["suffix", "ddtree"], "num_speculative_tokens": 32}',
    '{"method": "eagle3", "num_speculative_tokens": 32, "eagle_topk": 4, "eagle_num_steps": 7}',
    '{"method": "suffix", "num_speculative_tokens": 32}',
    '{"method": "ngram", "num_speculative_tokens": 8}',
)
MOST_TURNS = 3
Row: TypeAlias = dict[str, object]


class TimeIsUpError(Exception):
    """What was running does not fit any more."""


@dataclass(slots=True)
class Clock:
    """When all of it, and a part of it, has to end."""

    seconds: float
    part: float
    began: float = field(default_factory=time.perf_counter)
    part_began: float = 0.0

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self.began

    def check(self) -> None:
        """Raise if a part, or all, has taken too long."""
        if self.spent > self.seconds or time.perf_counter() - self.part_began > self.part:
            raise TimeIsUpError


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A drafter: vLLM's keys."""

    config: Mapping[str, object]

    @property
    def name(self) -> str:
        """Of the registry."""
        return str(self.config["method"])

    @property
    def nodes(self) -> int:
        """Draft nodes of a step."""
        return int(str(self.config.get("num_speculative_tokens", 0)))

    def network(self, folders: Mapping[str, Path]) -> Path | None:
        """The folder of its network among those of DFlash and EAGLE-3; None: it has none."""
        parts = self.config.get("parts")
        names = {self.name, *(map(str, parts) if isinstance(parts, list) else ())}
        if names & {"dflash", "ddtree"}:
            return folders.get("dflash")
        return folders.get("eagle3") if "eagle3" in names else None


@dataclass(slots=True, kw_only=True)
class Session:
    """What all parts share."""

    args: argparse.Namespace
    clock: Clock
    tasks: Sequence[Task]
    tokens: Tokenizer
    header: Row
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    doing: str = ""

    @property
    def settings(self) -> Settings:
        """Of a run; how many at a time is to be said."""
        return Settings(max_tokens=self.args.max_tokens, temperature=0.0)

    def chosen(self, sequences: int) -> Sequence[Task]:
        """The prompts that so many sequences answer."""
        if sequences == max(self.args.sequences):
            return self.tasks
        return self.tasks[: max(self.args.least, self.args.rounds * sequences)]

    def record(self) -> Row:
        """What there is so far."""
        end = {"seconds": round(self.clock.spent, 1), "left_out": self.left_out}
        return {**self.header, **end, "rows": self.rows}

    def keep(self) -> None:
        """Write what there is so far; a file is whole at every time."""
        if self.args.out is not None:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            fresh = self.args.out.with_suffix(".part")
            fresh.write_text(json.dumps(self.record(), indent=1, allow_nan=False) + "\n")
            fresh.replace(self.args.out)

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"{self.clock.spent:6.1f} s  {text}", file=sys.stderr, flush=True)

    def begin(self, name: str) -> None:
        """A part begins.

        Raises:
            TimeIsUpError: there is no time for it.
        """
        self.doing = name
        self.clock.part_began = time.perf_counter()
        self.clock.check()

    @contextmanager
    def part(self) -> Iterator[None]:
        """What is left out from where there is no time for it, or no memory; begins in the block."""
        try:
            yield
        except TimeIsUpError:
            self.left_out.append(f"{self.doing}: no time")
        except torch.OutOfMemoryError as error:
            self.left_out.append(f"{self.doing}: no memory ({str(error)[:80]})")
        self.keep()


@contextmanager
def engine_of(
    session: Session, model: str, way: Way, network: Path | None, loaded: LoadedModel
) -> Iterator[Engine]:
    """An engine of a loaded target with this drafter, for the time of the context."""
    args = session.args
    config = dict(way.config) | ({} if network is None else {"model": str(network)})
    values: dict[str, object] = {
        "model": model,
        "device": args.device,
        "dtype": args.dtype,
        "weights": "bf16",
        "seed": 0,
        "max_rows": max(args.sequences),
        "max_len": args.max_len,
        "graphs": "on-demand",
        "adaptive": False,
        "spec_check": "off",
        "spec_weights": "bf16",
        "speculative_config": json.dumps(config),
    }
    device = torch.device(args.device)
    if device.type == "cuda":
        values["memory_gb"] = args.memory_gb
    gc.collect()
    free_cached(device)
    engine = Engine.build(engine_config(values), loaded=loaded)
    try:
        yield engine
    finally:
        engine.close()


def answer(session: Session, engine: Engine, sequences: int, turn: int) -> tuple[Slice, Row]:
    """One run of the prompts for so many sequences, and what was not as in service in it."""
    names = {"steps_without_graph": "num_steps_without_graph", "graphs_captured": "num_graphs"}
    before = engine.report()
    done = run_one_way(
        engine,
        session.chosen(sequences),
        replace(session.settings, concurrency=sequences),
        "draft",
        stop_ids=stop_ids(session.tokens, engine),
        progress=lambda _, __: session.clock.check(),
        turn=turn,
    )
    after = engine.report()
    odd: Row = {name: int(after[key] - before[key]) for name, key in names.items()}
    return done, odd


def stop_ids(tokens: Tokenizer, engine: Engine) -> frozenset[int]:
    """Ids that end an answer."""
    return frozenset({*tokens.eos_token_ids, *engine.model_config.eos_token_ids})


def accept_length(samples: Sequence[Sample]) -> float:
    """Tokens of verify steps over verify steps."""
    steps = sum(s.stats.num_steps for s in samples)
    return sum(len(s.token_ids) - 1 for s in samples) / steps if steps else 1.0


def wide_rows(session: Session, way: Way, engine: Engine) -> Iterator[tuple[Row, Slice]]:
    """A row for each number of sequences."""
    for sequences in session.args.sequences:
        session.begin(f"{way.name}, {sequences} sequences")
        for turn in range(MOST_TURNS):
            done, odd = answer(session, engine, sequences, turn=10 * sequences + turn)
            if not odd["graphs_captured"]:
                break
        made = sum(len(s.token_ids) for s in done.samples)
        yield (
            {
                "drafter": way.name,
                "parts": way.config.get("parts"),
                "nodes": way.nodes,
                "sequences": sequences,
                "prompts": len(done.samples),
                "tokens": made,
                "seconds": round(done.seconds, 3),
                "tok_s": round(made / done.seconds, 2),
                "over_plain": None,
                "accept_length": round(accept_length(done.samples), 4),
                "accept_length_small": None,
                "over_small": None,
                "accept_length_recorded": recorded(session, way, len(done.samples)),
                "runs": turn + 1,
                **odd,
            },
            done,
        )


def recorded(session: Session, way: Way, prompts: int) -> float | None:
    """The small model's accept length in the record of its own; None: it has no such row."""
    if not RECORDED.exists():
        return None
    for row in json.loads(RECORDED.read_text(encoding="utf-8"))["rows"]:
        settings = {k: v for k, v in way.config.items() if k.startswith("eagle_")}
        wanted = {
            "drafter": way.name,
            "parts": way.config.get("parts"),
            "nodes": way.nodes,
            "dataset": "human_eval",
            "group": "humaneval",
            "temperature": 0.0,
            "device": torch.device(session.args.device).type,
            "max_tokens": session.args.max_tokens,
            "adaptive": False,
            "prompts": prompts,
        }
        if all(row.get(k) == v for k, v in wanted.items()) and row.get("settings", {}) == settings:
            return float(row["accept_length"])
    return None


def differences(wide: Slice, small: Slice) -> Row:
    """Where answers part from the small model's, and how clear its choice was there."""
    own = {s.task: s for s in small.samples}
    margins, equal = [], 0
    for sample in wide.samples:
        plain = own[sample.task]
        pairs = zip(plain.token_ids, sample.token_ids, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:
            equal += len(plain.token_ids) == len(sample.token_ids)
            continue
        best, second = plain.logprobs[place].top_logprobs[:2]
        margins.append(best - second)
    every = [p.top_logprobs[0] - p.top_logprobs[1] for s in small.samples for p in s.logprobs]
    return {
        "equal": equal,
        "parted": len(margins),
        "largest_margin_nats": round(max(margins), 4) if margins else None,
        "median_margin_nats": round(statistics.median(margins), 4) if margins else None,
        "median_margin_anywhere_nats": round(statistics.median(every), 3),
    }


def speed(session: Session, ways: Sequence[Way], target: LoadedModel, small: Slice) -> None:
    """Rows of every drafter on the widened target."""
    folders = networks_of((session.args.folder / "drafters").iterdir())
    name = str(session.args.folder / "target")
    plain: dict[int, float] = {}
    for way in ways:
        with session.part():
            session.begin(way.name)
            with engine_of(session, name, way, way.network(folders), target) as engine:
                session.say(f"{way.name}: engine is ready")
                for row, done in wide_rows(session, way, engine):
                    sequences, made = int(str(row["sequences"])), float(str(row["tok_s"]))
                    if way.name == "none":
                        plain[sequences] = made
                    if sequences in plain:
                        row["over_plain"] = round(made / plain[sequences], 4)
                    row["differences"] = differences(done, small)
                    session.rows.append(row)
                    session.keep()
                    session.say(json.dumps(row))


def small_rows(session: Session, ways: Sequence[Way], loaded: LoadedModel) -> None:
    """The small model's accept lengths, put beside the rows that there are."""
    folders = networks_of(session.args.drafter_folder or (HERE.parent / "drafters").iterdir())
    for way in ways:
        mine = [row for row in session.rows if row["drafter"] == way.name]
        if way.name == "none" or not mine:
            continue
        with session.part():
            session.begin(f"{way.name}, small model")
            folder = way.network(folders)
            with engine_of(session, session.args.model, way, folder, loaded) as engine:
                done, _ = answer(session, engine, max(session.args.sequences), turn=0)
            for row in mine:
                found = [s for s in done.samples if s.task < int(str(row["prompts"]))]
                length = accept_length(found)
                row["accept_length_small"] = round(length, 4)
                row["over_small"] = round(float(str(row["accept_length"])) / length, 4)
            session.say(f"{way.name}, small model: {accept_length(done.samples):.4f}")


def networks_of(folders: Iterable[Path]) -> dict[str, Path]:
    """Which of these folders hold DFlash's and EAGLE-3's networks."""
    found = {}
    for folder in sorted(folders):
        config = folder / "config.json"
        if config.is_file():
            names = json.loads(config.read_text(encoding="utf-8"))["architectures"]
            found["dflash" if {FIRST, SECOND} & set(names) else "eagle3"] = folder
    return found


def main() -> int:
    """Widen, answer, compare."""
    args = arguments()
    clock = Clock(args.seconds, args.part_seconds)
    device = torch.device(args.device)
    sizes = {
        key: int(value) for key, value in (text.split("=", 1) for text in args.size)
    }  # for trials on a CPU
    drafters = [str(folder) for folder in args.drafter_folder or ()]
    planned = plan_widening(model=args.model, drafters=drafters, dtype=args.dtype, sizes=sizes)
    small = models.load(
        models.resolve(args.model),
        device=device,
        dtype=planned.parts[0].pieces[0].dtype,
        weights="bf16",
    )
    tokens = Tokenizer.from_files(small.files.path)
    prompts = workload.load(args.prompts, limit=args.limit)
    header: Row = {
        "schema": "paceline-widened-speed/1",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "benchmarks/widened_speed.py", *command_line()[1:]],
        "versions": versions(),
        "source": source(),
        "machine": machine(device),
        "widened": planned.record,
        "dtype": args.dtype,
        "prompts": {
            "digest": prompts.digest,
            "count": len(prompts.prompts),
            "max_tokens": args.max_tokens,
        },
    }
    session = Session(
        args=args,
        clock=clock,
        tasks=encode(prompts, tokens),
        tokens=tokens,
        header=header,
    )
    ways = [Way(config=json.loads(text)) for text in args.drafter or DRAFTERS]
    clock.part_began = time.perf_counter()
    with engine_of(session, args.model, Way(config={"method": "none"}), None, small) as engine:
        plain = run_one_way(
            engine,
            session.tasks,
            replace(session.settings, concurrency=max(args.sequences)),
            "baseline",
            stop_ids=stop_ids(tokens, engine),
            baseline_logprobs=2,
        )
    session.say(f"{len(plain.samples)} answers of the small model")
    replace(planned, parts=planned.parts[1:]).write(
        args.folder / "drafters",
        shard_bytes=5_000_000_000,
        progress=lambda _, __: None,
        device=device,
    )
    header["seconds_to_write_drafters"] = round(clock.spent, 1)
    session.say("drafters are written")
    target = load_target(planned.parts[0], args.folder / "target", device, planned.seed)
    session.say("the target is widened")
    speed(session, ways, target, plain)
    del target
    if not args.without_small:
        small_rows(session, ways, small)
    publish(session.record(), args.out)
    return 0


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for drafters and the tokenizer; empty, or new")
    parser.add_argument("--model", default="default", help="what is widened")
    parser.add_argument(
        "--drafter-folder", type=Path, action="append", help="its drafters; default: ours"
    )
    parser.add_argument("--size", action="append", default=[], help="NAME=NUMBER of the new shape")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[HERE / "prompts" / "human_eval.jsonl"]
    )
    parser.add_argument("--limit", type=int, help="prompts; default: all")
    parser.add_argument("--drafter", action="append", help="as --speculative-config; several")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=3, help="prompts of a sequence, at least")
    parser.add_argument("--least", type=int, default=6, help="prompts of a run, at least")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-len", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=215, help="for all of it")
    parser.add_argument("--part-seconds", type=float, default=60, help="for one run or drafter")
    parser.add_argument("--memory-gb", type=float, default=60, help="of a GPU, for an engine")
    parser.add_argument("--without-small", action="store_true", help="no drafters on the small one")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
