r"""Leaves out one part of the GPU path at a time: what a decode step costs without it.

What it answers: what graphs, own products, fused norms and the others each save, in one process on one
machine. One engine is built for each drafter. For a variant the operators' own lines are hidden from the
dispatch table, so that their definitions in PyTorch run (or two operators in place of one, or the library's
product); then the step is captured anew, and steps are timed as `paceline bench steps` does. Between the
two measurements of everything the clock may drift; differences are from their mean.

    python benchmarks/gpu_without.py --out benchmarks/results/h200-without.json

Not here: attention, which is no operator of that table (`gpu_attention.py`). A definition that cannot be
captured is said in `left_out`. Variants that do not begin within `--seconds` are listed there too; the
record is written after each. Weights are random, so nothing drafted is accepted: a drafter's step costs
the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from paceline.bench.machine import Json, machine, source, versions
from paceline.bench.step_batch import Batch
from paceline.bench.step_cases import Case, Spec, cases_of, find_shape, parse_spec
from paceline.bench.steps import Bench, Settings
from paceline.cli.workbench import command_line
from paceline.core.config import CacheConfig, EngineConfig
from paceline.core.device import give_back
from paceline.core.errors import PacelineError
from paceline.engine.engine import Engine
from paceline.engine.graph_keys import GraphKey
from paceline.engine.graphs import CudaRecorder
from paceline.engine.launch import graphs_of
from paceline.ops import dispatch
from paceline.ops.triton import overlap

CASES = ("none@1,64", "dflash:qwen3-8b-dflash-b16@1,8")
SEED = 0
OWN = frozenset({"triton", "own"})  # names of lines that are hidden; "own": a CPU's, for trials

NORMS = ("rms_norm", "add_rms_norm")
LINEAR = ("linear", "linear_f32", "linear_add_rms_norm", "linear_swiglu")
BOOKKEEPING = (
    *("select", "verify_inputs", "draft_inputs", "pick_places", "judge", "advance", "compact"),
    *("move_paths", "chain", "emitted", "best_first"),
)
CANDIDATES = ("largest", "rank_candidates", "learn", "keyed_noise", "noise_ahead")
GROUPS: dict[str, tuple[str, ...]] = {
    "linear": LINEAR,
    "norms": (*NORMS, "linear_add_rms_norm"),
    "joined norms": ("linear_add_rms_norm",),
    "rope_write": ("rope_write", "context_write", "rope", "kv_write"),
    "silu_mul": ("silu_mul", "linear_swiglu"),
    "bookkeeping": BOOKKEEPING,
    "pick": ("pick",),
    "candidates": CANDIDATES,
    "embedding": ("embedding",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is left out."""

    name: str
    hidden: tuple[str, ...] = ()  # operators
    graphs: bool = True
    overlaps: bool = True


EVERYTHING = "nothing"
HIDDEN = tuple(dict.fromkeys(op for ops in GROUPS.values() for op in ops))
VARIANTS = (
    Variant(name="graphs", graphs=False),
    Variant(name="overlap", overlaps=False),
    *(Variant(name=name, hidden=ops) for name, ops in GROUPS.items()),
    Variant(name="all operators and overlap", hidden=HIDDEN, overlaps=False),
    Variant(name="all of it", hidden=HIDDEN, overlaps=False, graphs=False),
)


@contextmanager
def definitions_of(ops: Sequence[str]) -> Iterator[None]:
    """Have these operators computed by what they are defined by, for the time of the context."""
    kept = dict(dispatch.OPS)
    chosen = dispatch._chosen  # noqa: SLF001 (what was chosen before is remembered)
    for op in ops:
        dispatch.OPS[op] = tuple(line for line in kept[op] if line.name not in OWN)
    chosen.clear()
    try:
        yield
    finally:
        dispatch.OPS.update(kept)
        chosen.clear()


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """Have no kernel launched before the one before it has ended, for the time of the context."""
    most = overlap._MOST_TOKENS  # noqa: SLF001 (no setting of service)
    overlap._MOST_TOKENS = 0  # noqa: SLF001 (the same)
    try:
        yield
    finally:
        overlap._MOST_TOKENS = most  # noqa: SLF001 (the same)


class Subject:
    """An engine whose step is taken again and again, each time made otherwise.

    Args:
        engine: with a drafter.
        cases: sequences and contexts; all are prefilled once.
        settings: how steps are timed.
    """

    def __init__(self, engine: Engine, cases: Sequence[Case], settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._batches = [Batch(engine, case, SEED) for case in cases]
        for batch in self._batches:
            batch.prefill()
        self._keys: list[GraphKey] = []

    def measure(self, variant: Variant) -> dict[str, Json]:
        """Milliseconds a step of every case, without what the variant leaves out.

        Raises:
            RuntimeError: what is to be captured cannot be.
        """
        with ExitStack() as stack:
            stack.enter_context(definitions_of(variant.hidden))
            if not variant.overlaps:
                stack.enter_context(one_after_the_other())
            seconds = self._capture(graphs=variant.graphs)
            times = [self._times(batch, graphs=variant.graphs) for batch in self._batches]
        return {
            "without": variant.name,
            "operators": list(variant.hidden),
            "captured": variant.graphs,
            "ms_per_step": [round(1e3 * statistics.median(one), 3) for one in times],
            "least_ms": [round(1e3 * min(one), 3) for one in times],
            "capture_seconds": round(seconds, 2),
        }

    def _capture(self, *, graphs: bool) -> float:
        """Make the graphs that earlier variants needed; the first one makes them as it goes."""
        launcher = self._engine._launcher  # noqa: SLF001 (its graphs are to be others)
        launcher.graphs = None
        device = torch.device(self._engine.config.device)
        give_back(device)  # the last variant's
        began = time.perf_counter()
        if graphs:
            launcher.graphs = graphs_of(
                self._engine._parts,  # noqa: SLF001 (the same)
                CudaRecorder(device),
            )
            for key in self._keys:
                launcher.graphs.make(key)
        return time.perf_counter() - began

    def _times(self, batch: Batch, *, graphs: bool) -> list[float]:
        """Seconds a step of each repeat; the first one is not counted."""
        repeats, found = self._settings.repeats if graphs else 2, []
        for repeat in range(-1, repeats):
            batch.start()
            batch.steps(self._settings.warmup)
            seconds, _ = batch.steps(self._settings.steps)
            batch.stop()
            if repeat >= 0:
                found.append(seconds / self._settings.steps)
        cache = self._engine._launcher.graphs  # noqa: SLF001 (the same)
        if cache is not None:
            known = cache._graphs  # noqa: SLF001 (the same)
            self._keys = list(dict.fromkeys((*self._keys, *known)))
        return found


class Session:
    """The record, and the time that there is."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._began = time.perf_counter()
        self._args = args
        self.rows: list[dict[str, Json]] = []
        self.left_out: list[Json] = []
        self.header: dict[str, Json] = {}

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._began

    def keep(self) -> None:
        """Write what there is so far."""
        if self._args.out is None:
            return
        record = {
            **self.header,
            "seconds": round(self.spent, 1),
            "left_out": self.left_out,
            "rows": self.rows,
        }
        self._args.out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record, indent=1, allow_nan=False)
        self._args.out.write_text(text + "\n", encoding="utf-8")

    def say(self, text: str) -> None:
        """One line of progress."""
        print(f"{self.spent:6.1f} s  {text}", file=sys.stderr, flush=True)


def measure(session: Session, subject: Subject, facts: dict[str, Json], until: float) -> None:
    """All variants of an engine: everything, each, and everything again."""
    mine: list[dict[str, Json]] = []
    whole = Variant(name=EVERYTHING)
    for variant in (whole, *session_variants(session), whole):
        if variant.hidden == CANDIDATES and facts["spec"] == "none":
            continue  # nobody drafts
        name = f"{facts['spec']} without {variant.name}"
        if variant is not whole and session.spent > until:
            session.left_out.append(f"{name}: no time")
            continue
        try:
            row = {**facts, **subject.measure(variant)}
        except (
            RuntimeError,
            PacelineError,
        ) as error:  # as a rule of a capture: nothing has changed
            session.left_out.append(f"{name}: {str(error).splitlines()[0]}")
            session.say(session.left_out[-1])  # type: ignore[arg-type]
            continue
        mine.append(row)
        session.rows.append(row)
        compare(mine)
        session.keep()
        session.say(f"{name}: {row['ms_per_step']}, more {row.get('more_ms')}")


def session_variants(session: Session) -> Sequence[Variant]:
    """Those that were asked for."""
    asked = session._args.without  # noqa: SLF001 (of this file)
    return [v for v in VARIANTS if not asked or v.name in asked]


def compare(rows: Sequence[dict[str, Json]]) -> None:
    """Put the differences from everything into one engine's rows."""
    whole = [numbers(row) for row in rows if row["without"] == EVERYTHING]
    if not whole:
        return
    means = [statistics.fmean(column) for column in zip(*whole, strict=True)]
    for row in rows:
        own = numbers(row)
        row["more_ms"] = [round(ms - mean, 3) for ms, mean in zip(own, means, strict=True)]


def numbers(row: dict[str, Json]) -> list[float]:
    """Milliseconds of a row's cases."""
    found = row["ms_per_step"]
    assert isinstance(found, list), "they are a list"
    return [float(str(value)) for value in found]


def arguments() -> argparse.Namespace:
    """What was asked for; cases are read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", help="a shape's name, or a folder")
    parser.add_argument(
        "--case", nargs="+", default=list(CASES), help="DRAFTER@SEQUENCES[,SEQUENCES...]"
    )
    parser.add_argument(
        "--without",
        nargs="+",
        choices=[v.name for v in VARIANTS],
        help="what is left out; default: each in turn",
    )
    parser.add_argument("--context", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=24, help="of a repeat")
    parser.add_argument("--repeats", type=int, default=3, help="after one that is not counted")
    parser.add_argument("--warmup", type=int, default=4, help="steps before those of a repeat")
    parser.add_argument(
        "--seconds", type=float, default=110, help="for all; no variant begins later"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="file of the JSON record")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("this path's parts need an NVIDIA GPU, and PyTorch finds none; run it on one")
    if min(args.context, args.steps, args.repeats, args.warmup) < 1:
        parser.error("--context, --steps, --repeats and --warmup are 1 or more")
    args.folder = find_shape(args.model)
    if args.folder is None:
        parser.error(f"--model {args.model}: no shape and no folder with a config.json; give one")
    try:
        args.cases = [cases_in(text, args.context) for text in args.case]
    except PacelineError as error:
        parser.error(str(error))
    return args


def cases_in(text: str, context: int) -> tuple[Spec, list[Case]]:
    """Read DRAFTER@SEQUENCES,SEQUENCES...

    Raises:
        PacelineError: it has another form.
    """
    name, _, counts = text.rpartition("@")
    return parse_spec(name), cases_of([], [], [f"{n}x{context}" for n in counts.split(",")])


def main() -> int:
    """Run it."""
    args = arguments()
    session = Session(args)
    settings = Settings(
        steps=args.steps, repeats=args.repeats, warmup=args.warmup, stage_steps=0, seed=SEED
    )
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
    session.header = {
        "schema": "paceline-without/1",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["python", "benchmarks/gpu_without.py", *command_line()[1:]],
        "versions": versions(),
        "source": source(),
        "machine": machine(bench.device),
        "what": "milliseconds a step without one part at a time, medians of the repeats (2 without "
        "graphs); more_ms: than with everything, the mean of the first and the last measurement",
        "model": args.model,
        "settings": {
            "context": args.context,
            "steps": args.steps,
            "repeats": args.repeats,
            "warmup": args.warmup,
        },
    }
    for i, (spec, cases) in enumerate(args.cases):
        until = args.seconds * (i + 1) / len(args.cases)  # an equal part for each engine
        with bench.engine(spec, cases, settings) as engine:
            subject = Subject(engine, cases, settings)
            facts: dict[str, Json] = {
                "spec": spec.name,
                "sequences": [case.sequences for case in cases],
            }
            measure(session, subject, facts, until)
    session.keep()
    return 0


if __name__ == "__main__":
    sys.exit(main())
