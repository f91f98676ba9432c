r"""Lets the engine answer under every schema of a JSON Schema test file, and lets `jsonschema` judge the answers.

    python benchmarks/json_schemas.py --file draft2020-12.jsonl --out record.json

A line of the file is one case: `{"file", "description", "schema", "tests": [{"data", "valid"}, ...]}`, as the
groups of the official JSON Schema test suite are, with the file that each is from. The model is tiny and random
but can write any byte; answers are sampled at temperature 1, with a push towards the marks of JSON and towards
the end, or few would come to one. Trees come from the suffix drafter and from the grammars' forced tokens.

Of each schema: is it taken? If not, does the message name a keyword? If so, `--samples` answers in every layout
of white space are made, with trees and plain, and
- the tokens must be those of plain decoding;
- a finished answer must be JSON without a name twice in one object, and an instance of the schema for
  `jsonschema` (formats included, where it has a check for them; the record lists those), or for `jsonschema_rs`
  where the schema has a regex that Python cannot read;
- an answer that the budget has cut must be the beginning of a text of the grammar;
- no instance that the file calls invalid may be a text of the grammar. Valid ones that are none are counted:
  properties have an order.

Fields. `cases`, `accepted`, `refused`; `refused_for`: schemas by what the message names (one may name several);
`answers`: `made`, `finished`, `validated`, `cut`, `unequal` to plain decoding, `distinct` texts; `judged_by`: finished
answers by judge; `unanswered`: schemas none of whose answers finished; `instances`: `invalid`, `invalid_allowed`, `valid`, `valid_allowed`; `drafted`: tokens that were
`accepted`, and those of them that were `forced` by grammars; `failures`: every one, in words. It ends with 1 if
there are any. On one core the whole suite of draft 2020-12 takes a few minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from paceline.api.grammar import LAYOUTS, ConstraintError, Constraints
from paceline.api.tokenizer import Tokenizer
from paceline.bench.machine import machine, source, versions
from paceline.cli.console import progress
from paceline.core.config import CacheConfig, DraftConfig, EngineConfig
from paceline.core.request import Constraint, FinishReason, Request, SamplingParams
from paceline.engine.engine import Engine

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = (
    "example: python benchmarks/json_schemas.py --file tests/data/json_schemas.jsonl --samples 1"
)
ROWS = 16  # answers that are made at a time
END = 2  # the id that ends a text
# Random text is rarely an object, and rarely closes what it has opened.
PUSHED = {'"': 3.5, "{": 4.5, "[": 3.5, "}": 4.0, "]": 4.0, ":": 3.0, ",": 2.5, "1": 1.0}
PUSH_TO_THE_END = 5.0
PROMPT = '{"the quick":"fox","foo":[1,2,"bar"]}'
Row: TypeAlias = dict[str, Any]


@dataclass
class Tally:
    """What was found so far."""

    refused_for: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    judges: Counter[str] = field(default_factory=Counter)
    texts: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """A model, and what is asked of it.

    Attributes:
        engines: with trees, and plain.
        max_tokens: of an answer.
    """

    tokenizer: Tokenizer
    constraints: Constraints
    engines: Mapping[str, Engine]
    samples: int
    max_tokens: int
    whitespace: Sequence[str]


def named(case: Row) -> str:
    """A case, for people."""
    return f"{Path(case['file']).stem}: {case['description']}"


def read(text: str) -> object:
    """An answer as a JSON value.

    Raises:
        ValueError: it is no JSON, or an object has a name twice.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            msg = "an object has a name twice"
            raise ValueError(msg)
        return found

    return json.loads(text, object_pairs_hook=unique)


class Verdict(NamedTuple):
    """Why a finished answer is not what the schema asks for (None: it is), and who says so."""

    wrong: str | None
    judge: str = "jsonschema"


def verdict(schema: object, text: str) -> Verdict:
    """Judge a finished answer."""
    try:
        value = read(text)
    except ValueError as error:
        return Verdict(f"{text!r} is no answer: {error}")
    judge = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    try:
        judge.validate(value)
    except ValidationError as error:
        return Verdict(f"{text!r} does not validate: {error.message}")
    except re.error:
        return second_verdict(schema, value)
    except Exception as error:  # noqa: BLE001 - what cannot be judged is told, not counted as right
        return Verdict(f"{text!r} cannot be judged: {type(error).__name__}: {error}", "nobody")
    return Verdict(None)


def second_verdict(schema: object, value: object) -> Verdict:
    r"""As `verdict`, where the schema has a regex that is none of Python's, such as \p{Letter}."""
    import jsonschema_rs

    try:
        jsonschema_rs.Draft202012Validator(schema, validate_formats=True).validate(value)
    except jsonschema_rs.ValidationError as error:
        return Verdict(f"{value!r} does not validate: {error.message}", "jsonschema_rs")
    return Verdict(None, "jsonschema_rs")


def obeys(constraint: Constraint, tokens: Sequence[int]) -> bool:
    """Whether tokens are a text of the grammar, or the beginning of one."""
    state = constraint.start()
    return all(state.advance(token) for token in tokens)


def instances(bench: Bench, case: Row, constraint: Constraint, tally: Tally) -> None:
    """Ask the grammar about the file's own instances, written without white space."""
    for each in case["tests"]:
        text = json.dumps(each["data"], separators=(",", ":"), ensure_ascii=False)
        allowed = obeys(constraint, [*bench.tokenizer.encode(text, False), END])
        kind = "valid" if each["valid"] else "invalid"
        tally.counts[kind] += 1
        tally.counts[f"{kind}_allowed"] += allowed
        if allowed and not each["valid"]:
            tally.failures.append(f"{named(case)}: {text} is invalid, and allowed")


@dataclass(frozen=True)
class Asked:
    """One sample of an answer that is wanted."""

    case: Row
    layout: str
    sample: int
    constraint: Constraint

    @property
    def name(self) -> str:
        """For people, and the request's."""
        return f"{named(self.case)} ({self.layout}, sample {self.sample})"

    def request(self, bench: Bench) -> Request:
        """A new request for it."""
        bias = {bench.tokenizer.encode(t, False)[0]: v for t, v in PUSHED.items()}
        return Request(
            id=self.name,
            prompt_ids=bench.tokenizer.encode(PROMPT, False),
            params=SamplingParams(
                temperature=1.0,
                seed=zlib.crc32(self.name.encode()),
                max_tokens=bench.max_tokens,
                logit_bias={**bias, END: PUSH_TO_THE_END},
            ),
            stop_ids=frozenset({END}),
            grammar=self.constraint.start(),
        )


Show: TypeAlias = Callable[[int, int], None]
Answers: TypeAlias = dict[str, tuple[list[int], FinishReason | None]]


def answered(engine: Engine, requests: Sequence[Request], show: Show, done: int) -> Answers:
    """Tokens, and why they ended, of each request; `done` others have been answered before."""
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    reasons: dict[str, FinishReason | None] = {}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
        show(done + len(reasons), 2 * len(requests))
    return {key: (found, reasons.get(key)) for key, found in tokens.items()}


def judge(bench: Bench, one: Asked, found: Answers, plain: Answers, tally: Tally) -> bool:
    """Judge one answer; returns whether it finished."""
    tokens, reason = found[one.name]
    tally.counts["made"] += 1
    if tokens != plain[one.name][0]:
        tally.counts["unequal"] += 1
        tally.failures.append(f"{one.name}: the tokens are not those of plain decoding")
    if not obeys(one.constraint, tokens):
        tally.failures.append(f"{one.name}: {tokens} is no text of the grammar")
    if reason is FinishReason.LENGTH:
        tally.counts["cut"] += 1
        return False
    if reason is not FinishReason.STOP:
        tally.failures.append(f"{one.name}: it ended by {reason}")
        return False
    text = bench.tokenizer.decode(tokens[:-1])
    tally.texts.add(text)
    wrong, who = verdict(one.case["schema"], text)
    tally.counts["finished"] += 1
    tally.counts["validated"] += wrong is None
    tally.judges[who] += 1
    if wrong is not None:
        tally.failures.append(f"{one.name}: {wrong}")
    return True


def wanted(bench: Bench, case: Row, tally: Tally) -> list[Asked]:
    """Compile a schema and ask its grammar about the file's instances; the answers that it is to get."""
    schema = case["schema"]
    try:
        compact = bench.constraints.json_schema(schema, whitespace="compact")
    except ConstraintError as error:
        tally.counts["refused"] += 1
        tally.refused_for.update(error.keywords)
        if not error.keywords or not all(keyword in str(error) for keyword in error.keywords):
            tally.failures.append(f"{named(case)}: the refusal names no keyword: {error}")
        return []
    tally.counts["accepted"] += 1
    instances(bench, case, compact, tally)
    found = []
    for layout in bench.whitespace:
        constraint = bench.constraints.json_schema(schema, whitespace=layout)  # type: ignore[arg-type]
        found += [Asked(case, layout, i, constraint) for i in range(bench.samples)]
    return found


def result(bench: Bench, tally: Tally, cases: int) -> Row:
    """What the record says of the answers; see the module."""
    report = bench.engines["suffix"].report()
    counts = tally.counts
    answer = ("made", "finished", "validated", "cut", "unequal")
    kinds = ("invalid", "invalid_allowed", "valid", "valid_allowed")
    forced = int(report["spec_decode_num_forced_tokens"])
    return {
        "cases": cases,
        "accepted": counts["accepted"],
        "refused": counts["refused"],
        "refused_for": dict(sorted(tally.refused_for.items())),
        "answers": {**{name: counts[name] for name in answer}, "distinct": len(tally.texts)},
        "judged_by": dict(sorted(tally.judges.items())),
        "unanswered": counts["unanswered"],
        "instances": {name: counts[name] for name in kinds},
        "drafted": {
            "accepted": int(report["spec_decode_num_accepted_tokens"]),
            "forced": forced,
        },
        "failures": tally.failures,
    }


def measure(cases: Sequence[Row], bench: Bench, show: Show = lambda *_: None) -> Row:
    """Judge every case."""
    tally = Tally()
    asked = [one for case in cases for one in wanted(bench, case, tally)]
    found, plain = (
        answered(engine, [one.request(bench) for one in asked], show, i * len(asked))
        for i, engine in enumerate(bench.engines.values())
    )
    finished = {named(one.case): False for one in asked}
    for one in asked:
        finished[named(one.case)] |= judge(bench, one, found, plain, tally)
    tally.counts["unanswered"] = list(finished.values()).count(False)
    return result(bench, tally, len(cases))


def built(folder: Path, max_tokens: int, method: str) -> Engine:
    """An engine in float64."""
    length = 64 * math.ceil((len(PROMPT) + max_tokens + 16) / 64)
    return Engine.build(
        EngineConfig(
            model=str(folder),
            dtype="float64",
            device="cpu",
            seed=0,
            threads=1,
            cache=CacheConfig(page_size=16, max_rows=ROWS, max_len=length),
            draft=DraftConfig(
                method=method, adaptive=False, num_speculative_tokens=8, prompt_lookup_min=1
            ),
        )
    )


def prepared(folder: Path, samples: int, max_tokens: int, whitespace: Sequence[str]) -> Bench:
    """Write the tiny model to a folder, and load it twice."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # the model is the tests'
    from tests import tiny
    from tests.byte_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    size = 32 * math.ceil(tokenizer.vocab_size / 32)  # full words of a mask
    tiny.write_tiny(folder, seed=3, vocab_size=size, max_position_embeddings=4096)
    engines = {name: built(folder, max_tokens, name) for name in ("suffix", "none")}
    return Bench(tokenizer, Constraints(tokenizer, size), engines, samples, max_tokens, whitespace)


def main() -> int:
    """Judge the file, write the record, print it without its failures' texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=EXAMPLE)
    parser.add_argument("--file", type=Path, required=True, help="cases, one JSON object a line")
    parser.add_argument("--out", type=Path, help="where the record goes; default: stdout alone")
    parser.add_argument("--samples", type=int, default=4, help="answers per schema and layout (4)")
    parser.add_argument("--max-tokens", type=int, default=160, help="of an answer (160)")
    parser.add_argument(
        "--whitespace", nargs="+", choices=list(LAYOUTS), default=["flexible", "compact"],
        help="layouts of JSON (flexible compact)",
    )  # fmt: skip
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = args.file.read_text(encoding="utf-8").splitlines()
    cases = [json.loads(line) for line in lines]
    begin = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        progress("answers") as show,
    ):
        bench = prepared(Path(folder), args.samples, args.max_tokens, args.whitespace)
        found = measure(cases, bench, show)
    record = {
        "machine": machine(torch.device("cpu")),
        "versions": {**versions(), **judges()},
        "source": source(),
        "workload": {
            "file": args.file.name,
            "sha256": hashlib.sha256(args.file.read_bytes()).hexdigest(),
            "samples": args.samples,
            "max_tokens": args.max_tokens,
            "whitespace": args.whitespace,
            "temperature": 1.0,
            "drafter": "suffix",
            "formats_judged": sorted(Draft202012Validator.FORMAT_CHECKER.checkers),
        },
        "seconds": round(time.perf_counter() - begin, 1),
        **found,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))
    return 1 if found["failures"] else 0


def judges() -> dict[str, str]:
    """Versions of what compiles the grammars, and of what judges."""
    from importlib import metadata

    return {name: metadata.version(name) for name in ("llguidance", "jsonschema", "jsonschema_rs")}


if __name__ == "__main__":
    sys.exit(main())
