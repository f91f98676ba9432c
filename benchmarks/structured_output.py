"""Measures what a grammar costs: `python benchmarks/structured_output.py --out record.json`.

nodes   microseconds of the parts of a grammar's work, at every state of JSON answers of the bundled model:
        a mask, the same where the next token is forced, forced tokens, a token forth and back. Those are
        the costs of one verified node.
steps   seconds of decoding steps of the same engine with 0 to all rows constrained, in turns, and their
        ratio to steps without any. Nobody ends: every answer is a long array.
answers what whole answers that keep a schema take, over a few prompts, each by itself, in turns: plain, with
        forced tokens alone (an n-gram drafter that never finds anything), and with the suffix drafter, in
        each layout of white space. Every answer's tokens must be those of plain decoding, it must have ended
        by itself, and its text must be JSON with the schema's keys; otherwise there is no record. Each answer has
        a scope of its own, so that nothing is drafted from an earlier one.

Fields. `layouts.*`: `compile_ms`, `start_us` (a state of its own for one more answer), `nodes_us` (above: median,
p90, number), `text` (the beginning of the answer that was walked). `steps[]`: `constrained` of `rows`, `ms_a_step`,
`ratio` of the medians. `answers.<drafter>/<layout>`: `answers`, `tokens` (of all), `steps` (verify passes), `forced`
(accepted tokens that the grammar proposed), `tokens_a_step`, `seconds` (all answers together, prompts included:
median of the repeats, the least, the most), `seconds_to_compact` (this drafter's compact answers take so many
times as long; above 1 compact is slower). `checks`: how many answers
were compared with plain decoding's, repeats of plain decoding itself included.

A CPU's record takes two to three minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from paceline.api.grammar import Constraints
from paceline.api.options import engine_config
from paceline.api.tokenizer import Tokenizer
from paceline.bench.machine import machine, source, versions
from paceline.core.request import (
    Constraint,
    FinishReason,
    Grammar,
    Request,
    SamplingParams,
    StepOutput,
)
from paceline.engine.engine import Engine
from paceline.models import LoadedModel
from paceline.models.source import resolve

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "occupation": {"enum": ["teacher", "engineer", "artist", "nurse"]},
        "languages": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "minItems": 1,
            "maxItems": 3,
        },
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "occupation", "languages", "married"],
    "additionalProperties": False,
}
LONG = {"type": "array", "items": PERSON, "minItems": 200}
ABOUT = "Here are people as JSON objects, each with name, age, occupation, languages and married:\n"
PROMPTS = (
    ABOUT,
    "Describe a nurse from Lisbon as JSON with name, age, occupation, languages and married:\n",
    "Tom Becker, 41, teaches German and French in Bern and is married. As JSON:\n",
    "An artist who speaks English only, single. Fill in the form:\n",
)
LENGTH = 400  # tokens within which every answer must end
ENDS = (2,)  # of the bundled model
NUMBERS = itertools.count()  # of requests
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
    """A greedy request in a scope of its own; it ends where its constraint leaves nothing else."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=constraint is None)
    grammar = None if constraint is None else constraint.start()
    ends = frozenset() if constraint is None else frozenset(ENDS)
    return Request(
        id=name, prompt_ids=ids, params=params, grammar=grammar, stop_ids=ends, scope=name
    )


def ended(outputs: Sequence[StepOutput], reason: FinishReason) -> None:
    """Refuse to measure what has failed.

    Raises:
        RuntimeError: a request ended for another reason.
    """
    for output in outputs:
        if output.finish_reason not in {None, reason}:
            msg = f"request {output.request_id} ended by {output.finish_reason}, not {reason}: {output.error}"
            raise RuntimeError(msg)


def steps(
    engine: Engine, ids: Sequence[int], constraint: Constraint, repeats: int, tokens: int
) -> list[Row]:
    """Decoding steps with a growing part of the rows constrained, in turns."""
    rows = engine.config.cache.max_rows
    seconds: dict[int, list[float]] = {n: [] for n in (0, 1, rows)}
    for _ in range(repeats):
        for count, times in seconds.items():
            for i in range(rows):
                engine.add(
                    asked(f"{i}-{next(NUMBERS)}", ids, constraint if i < count else None, tokens)
                )
            while engine.has_work:
                before = engine.counters.num_block_steps
                start = time.perf_counter()
                ended(engine.step(), FinishReason.LENGTH)
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


@dataclass
class Answers:
    """What the answers of one drafter and layout took."""

    seconds: list[float] = field(default_factory=list)  # of all prompts, one entry a repeat
    tokens: list[list[int]] = field(default_factory=list)  # of each prompt
    steps: int = 0
    forced: int = 0

    def row(self, compact: Answers) -> Row:
        """See the module."""
        count = sum(map(len, self.tokens))
        middle = statistics.median(self.seconds)
        return {
            "answers": len(self.tokens),
            "tokens": count,
            "steps": self.steps,
            "forced": self.forced,
            # A prompt's first token comes with its prefill.
            "tokens_a_step": round((count - len(self.tokens)) / self.steps, 3),
            "seconds": [round(x, 3) for x in (middle, min(self.seconds), max(self.seconds))],
            "seconds_to_compact": round(statistics.median(compact.seconds) / middle, 3),
        }


def answer(engine: Engine, prompts: Sequence[Sequence[int]], constraint: Constraint) -> Answers:
    """One answer to each prompt, one after the other."""
    found, start = Answers(), time.perf_counter()
    for ids in prompts:
        engine.add(asked(f"a{next(NUMBERS)}", ids, constraint, LENGTH))
        outputs: list[StepOutput] = []
        while engine.has_work:
            outputs += engine.step()
        ended(outputs, FinishReason.STOP)
        stats = outputs[-1].stats
        assert stats is not None, "an answer that has ended"
        found.tokens.append([t for output in outputs for t in output.token_ids])
        found.steps += stats.num_steps
        found.forced += stats.num_forced
    found.seconds.append(time.perf_counter() - start)
    return found


def check(found: Answers, plain: Answers, tokenizer: Tokenizer, name: str) -> None:
    """Refuse a record of answers that are not plain decoding's, or not the schema's.

    Raises:
        RuntimeError: with what differs.
    """
    if found.tokens != plain.tokens:
        msg = f"{name}: the tokens are not those of plain decoding, so nothing may be compared"
        raise RuntimeError(msg)
    for tokens in found.tokens:
        text = tokenizer.decode([t for t in tokens if t not in ENDS])
        if list(json.loads(text)) != list(PERSON["properties"]):
            msg = f"{name}: {text!r} is not what the schema asks for"
            raise RuntimeError(msg)


def answers(
    engines: Mapping[str, Engine],
    constraints: Mapping[str, Constraint],
    prompts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    repeats: int,
) -> tuple[dict[str, Row], int]:
    """Whole answers by drafter and layout, in turns; and how many were compared with plain decoding's."""
    found: dict[tuple[str, str], Answers] = {}
    compared = 0
    for _ in range(repeats):
        for name, engine in engines.items():
            for layout, constraint in constraints.items():
                one = answer(engine, prompts, constraint)
                plain = found.get(
                    ("none", layout)
                )  # the first engine, so it is there for all others
                check(one, plain or one, tokenizer, f"{name}/{layout}")
                compared += 0 if plain is None else len(prompts)
                one.seconds += found[name, layout].seconds if (name, layout) in found else []
                found[name, layout] = one
    rows = {
        f"{name}/{layout}": one.row(found[name, "compact"]) for (name, layout), one in found.items()
    }
    return rows, compared


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
    ids = tokenizer.encode(ABOUT)
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
        plain.add(asked(f"walked {whitespace}", ids, constraint, 120))
        tokens: list[int] = []
        while plain.has_work:
            outputs = plain.step()
            ended(outputs, FinishReason.LENGTH)
            tokens += [t for out in outputs for t in out.token_ids]
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
    held = {
        layout: constraints.json_schema(PERSON, whitespace=layout)
        for layout in ("flexible", "spaced", "compact")
    }
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    record["answers"], compared = answers(engines, held, prompts, tokenizer, args.repeats)
    record["checks"] = {"answers_equal_to_plain": compared, "repeats": args.repeats}
    return record


def main() -> None:
    """Measure, write the record, print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    record = measure(args)
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))


if __name__ == "__main__":
    sys.exit(main())
