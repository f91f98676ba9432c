r"""Measures throughput on a widened model: what speculation wins where a step costs what an 8 B's does.

    python benchmarks/widened_speed.py wide --prompts HumanEval.jsonl.gz --seconds 215 \
        --out benchmarks/results/h200-widened.json

The target is widened on the device and never written; drafters (2.1 GB) go to the folder. Every drafter
then answers prompts greedily, through the chat template, end-of-text honoured: at one sequence, at 8 and
at 64, which answers all prompts. Everything that is drafted is verified. A run in which a graph was captured
is not a figure of service, so it is repeated once; no run finds anything in the prefix cache.

Beside a row's accept length stand that of the small model with its own drafter over the same prompts
(`accept_length_small`, measured here at the end) and that of `accept-smollm2.json`, where it has the same
settings and prompts. The widened function is the small model's but for the order of sums, so in bfloat16
answers part at near-ties: `differences` says how often, and how far apart the small model's two best tokens
were there.

Graphs are captured when a step first asks for one, since there is no time for all of every drafter. The
record is written after every row: whatever ends this leaves what was measured. `--seconds` is for all; what
does not fit any more is listed in `left_out`. One JSON record is the last line of stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from widened_args import arguments, config_of, sizes_of, ways_of
from widened_session import (
    Clock,
    Row,
    Session,
    Way,
    differences,
    networks_of,
    recorded,
)

from paceline import models
from paceline.api.tokenizer import Tokenizer
from paceline.api.widen import plan_widening
from paceline.bench import workload
from paceline.bench.machine import machine, source, versions
from paceline.bench.run import Slice, accept_length, run_one_way
from paceline.bench.widen_load import load_target
from paceline.cli.workbench import command_line, encode, publish
from paceline.core.device import give_back
from paceline.core.errors import PacelineError
from paceline.engine.engine import Engine
from paceline.models import LoadedModel

HERE = Path(__file__).parent
MOST_TURNS = 2


@contextmanager
def engine_of(
    session: Session, model: str, way: Way, network: Path | None, loaded: LoadedModel
) -> Iterator[Engine]:
    """An engine of a loaded target with this drafter, for the time of the context."""
    config = config_of(session.args, model, way, network)
    give_back(torch.device(config.device))
    engine = Engine.build(config, loaded=loaded)
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


def wide_rows(session: Session, way: Way, engine: Engine) -> Iterator[tuple[Row, Slice]]:
    """A row for each number of sequences."""
    for sequences in session.args.sequences:
        session.begin(f"{way.name}, {sequences} sequences")
        for turn in range(MOST_TURNS):
            done, odd = answer(session, engine, sequences, turn=10 * sequences + turn)
            if not odd["graphs_captured"]:
                break
        made = sum(len(s.token_ids) for s in done.samples)
        length = accept_length(done.samples)
        before = recorded(way, len(done.samples), session.args.max_tokens, session.args.device)
        yield (
            {
                **way.facts,
                "sequences": sequences,
                "prompts": len(done.samples),
                "tokens": made,
                "seconds": round(done.seconds, 3),
                "tok_s": round(made / done.seconds, 2),
                "over_plain": None,
                "accept_length": round(length, 4),
                "accept_length_small": None,
                "over_small": None,
                "accept_length_recorded": before,
                "over_recorded": None if before is None else round(length / before, 4),
                "runs": turn + 1,
                **odd,
            },
            done,
        )


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
        mine = [row for row in session.rows if way.facts.items() <= row.items()]
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


def main() -> int:
    """Measure, or say what is wrong with what was asked."""
    try:
        return measure(arguments())
    except PacelineError as error:
        print(f"widened_speed: {error}", file=sys.stderr)
        return 2


def measure(args: argparse.Namespace) -> int:
    """Widen, answer, compare."""
    clock = Clock(args.seconds, args.part_seconds)
    device = torch.device(args.device)
    ways = ways_of(args.drafter)
    for way in ways:
        config_of(args, args.model, way, None)
    prompts = workload.load(args.prompts, limit=args.limit)
    sizes = sizes_of(args.size)  # for trials on a CPU
    drafters = [str(folder) for folder in args.drafter_folder or ()]
    planned = plan_widening(model=args.model, drafters=drafters, dtype=args.dtype, sizes=sizes)
    small = models.load(
        models.resolve(args.model),
        device=device,
        dtype=planned.parts[0].pieces[0].dtype,
        weights="bf16",
    )
    tokens = Tokenizer.from_files(small.files.path)
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


if __name__ == "__main__":
    sys.exit(main())
