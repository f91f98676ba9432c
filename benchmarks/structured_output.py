"""Measures what a grammar costs: `python benchmarks/structured_output.py --out record.json`.

nodes   microseconds of the parts of a grammar's work, at every state of JSON answers of the bundled model:
        a mask, the same where the next token is forced, forced tokens, a token forth and back. Those are
        the costs of one verified node.
steps   seconds of decoding steps of the same engine with 0 to all rows constrained, in turns, and their
        ratio to steps without any. Nobody ends: every answer is a long array.
answers tokens a step and tokens a second of an answer that keeps a schema: plain, with forced tokens alone (an
        n-gram drafter that never finds anything), and with the suffix drafter.

A CPU's record takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from paceline.api.grammar import Constraints
from paceline.api.options import engine_config
from paceline.api.tokenizer import Tokenizer
from paceline.bench.machine import machine, source, versions
from paceline.core.request import Constraint, Grammar, Request, SamplingParams
from paceline.engine.engine import Engine
from paceline.models import LoadedModel
from paceline.models.source import resolve

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "occupation": {"enum": ["teacher", "engineer", "artist", "nurse"]},
        "languages": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "occupation", "languages", "married"],
    "additionalProperties": False,
}
LONG = {"type": "array", "items": PERSON, "minItems": 200}
PROMPT = (
    "Here are people as JSON objects, each with name, age, occupation, languages and married:\n"
)
ENDS = (2,)  # of the bundled model
Row = dict[str, object]


def microseconds(call: Callable[[], object], repeats: int = 5) -> float:
    """The median of some calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def spread(values: Sequence[float]) -> Row:
    """Median, 90th percentile, number."""
    ranked = sorted(values)
    return {
        "median": round(statistics.median(ranked), 2),
        "p90": round(ranked[int(0.9 * (len(ranked) - 1))], 2),
        "count": len(ranked),
    }


def forth_and_back(state: Grammar, token: int) -> None:
    """A step along a path that was merely tried."""
    state.advance(token)
    state.rollback(1)


def nodes(constraint: Constraint, answers: Sequence[Sequence[int]]) -> Row:
    """Costs at every state of these answers."""
    found: dict[str, list[float]] = {"mask": [], "mask_forced": [], "forced": [], "token": []}
    for answer in answers:
        state = constraint.start()
        for token in answer:
            found["token"].append(microseconds(partial(forth_and_back, state, token)))
            # Where a run is known, as it is when a step asks for the mask.
            name = "mask_forced" if state.forced() else "mask"
            found[name].append(microseconds(state.mask, 1))  # a step asks once in each state
            state.advance(token)
            found["forced"].append(microseconds(state.forced, 1))
    return {name: spread(values) for name, values in found.items() if values}


def asked(name: str, ids: Sequence[int], constraint: Constraint | None, tokens: int) -> Request:
    """A greedy request; it ends where its constraint leaves nothing else."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    grammar = None if constraint is None else constraint.start(ignore_eos=True)
    ends = frozenset() if constraint is None else frozenset(ENDS)
    return Request(id=name, prompt_ids=ids, params=params, grammar=grammar, stop_ids=ends)


def steps(
    engine: Engine, ids: Sequence[int], constraint: Constraint, repeats: int, tokens: int
) -> list[Row]:
    """Decoding steps with a growing part of the rows constrained, in turns."""
    rows = engine.config.cache.max_rows
    seconds: dict[int, list[float]] = {n: [] for n in (0, 1, rows)}
    for _ in range(repeats):
        for count, times in seconds.items():
            for i in range(rows):
                engine.add(asked(f"{i}", ids, constraint if i < count else None, tokens))
            while engine.has_work:
                before = engine.counters.num_block_steps
                start = time.perf_counter()
                engine.step()
                if engine.counters.num_block_steps > before and engine.num_running == rows:
                    times.append(time.perf_counter() - start)
    plain = statistics.median(seconds[0])
    return [
        {
            "rows": rows,
            "constrained": n,
            "ms_a_step": {k: v if k == "count" else round(1e3 * v, 3) for k, v in raw(times)},
            "ratio": round(statistics.median(times) / plain, 3),
        }
        for n, times in seconds.items()
    ]


def raw(times: Sequence[float]) -> list[tuple[str, float]]:
    """Median, 90th percentile and number, unrounded."""
    ranked = sorted(times)
    p90 = ranked[int(0.9 * (len(ranked) - 1))]
    return [("median", statistics.median(ranked)), ("p90", p90), ("count", len(ranked))]


def answer(engine: Engine, ids: Sequence[int], constraint: Constraint | None) -> Row:
    """One answer of at most 160 tokens, and its speed."""
    engine.add(asked("a", ids, constraint, 160))
    done, start = [], time.perf_counter()
    while engine.has_work:
        done += engine.step()
    seconds = time.perf_counter() - start
    stats = done[-1].stats
    assert stats is not None, "an answer that has ended"
    return {
        "tokens": stats.num_output_tokens,
        "tokens_a_step": round(stats.accept_length, 3),
        "forced": stats.num_forced,
        "tokens_a_second": round(stats.num_output_tokens / seconds, 2),
    }


def built(
    loaded: LoadedModel | None, rows: int, device: str, method: str, **draft: object
) -> Engine:
    """An engine without pages of earlier requests, so that every answer computes the same."""
    given = {"method": method, "num_speculative_tokens": 8, **draft}
    options = {"max_rows": rows, "max_len": 512, "device": device, "speculative_config": given}
    config = engine_config({"model": "default", "prefix_cache": False, "seed": 0, **options})
    return Engine.build(config, loaded=loaded)


def measure(args: argparse.Namespace) -> Row:
    """The whole record."""
    tokenizer = Tokenizer.from_files(resolve("default").path)
    ids = tokenizer.encode(PROMPT)
    plain = built(None, args.rows, args.device, "none")
    start = time.perf_counter()
    constraints = Constraints(tokenizer, plain.model_config.vocab_size)
    tables = time.perf_counter() - start
    record: Row = {
        "machine": machine(torch.device(plain.config.device)),
        "versions": versions(),
        "source": source(),
        "vocabulary": plain.model_config.vocab_size,
        "tokenizer_seconds": round(tables, 3),
        "layouts": {},
    }
    layouts: dict[str, Row] = {}
    for whitespace in ("flexible", "spaced", "compact"):
        constraint = constraints.json_schema(LONG, whitespace=whitespace)
        row: Row = {
            "compile_ms": round(
                microseconds(lambda w=whitespace: constraints.json_schema(LONG, whitespace=w))
                / 1e3,
                3,
            ),
            "start_us": round(microseconds(constraint.start), 2),
        }
        plain.add(asked("a", ids, constraint, 120))
        tokens: list[int] = []
        while plain.has_work:
            tokens += [t for out in plain.step() for t in out.token_ids]
        row["nodes_us"] = nodes(constraint, [tokens])
        row["text"] = tokenizer.decode(tokens)[:200]
        layouts[whitespace] = row
    record["layouts"] = layouts
    spaced = constraints.json_schema(LONG, whitespace="spaced")
    record["steps"] = steps(plain, ids, spaced, args.repeats, 40)
    silent = {"prompt_lookup_min": 64, "prompt_lookup_max": 64}
    engines = {
        "none": plain,
        "forced alone": built(plain.loaded, args.rows, args.device, "ngram", **silent),
        "suffix": built(plain.loaded, args.rows, args.device, "suffix"),
    }
    answers: dict[str, Row] = {}
    for name, engine in engines.items():
        for layout in ("flexible", "spaced", "compact"):
            constraint = constraints.json_schema(PERSON, whitespace=layout)
            answers[f"{name}/{layout}"] = answer(engine, ids, constraint)
    record["answers"] = answers
    return record


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    record = measure(parser.parse_args())
    args = parser.parse_args()
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))


if __name__ == "__main__":
    sys.exit(main())
