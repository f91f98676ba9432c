"""Sixty schemas of the JSON Schema test suite: what is accepted is obeyed, what is not is refused by name.

`jsonschema` is the judge. Answers come from a tiny model with a byte-level vocabulary at temperature 1, with
trees of a suffix drafter, and equal plain decoding's.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from paceline.api.grammar import ConstraintError, Constraints
from paceline.api.tokenizer import Tokenizer
from paceline.core.request import Constraint, FinishReason, Request, SamplingParams
from tests import tiny, tiny_tokenizers
from tests.engine.as_on_gpu import as_on_gpu
from tests.engine.harness import Outcome, engine, run

VOCABULARY = 416  # 13 full words of a mask
FILE = Path(__file__).parent.parent / "data" / "json_schemas.jsonl"
CASES: list[dict[str, Any]] = [
    json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()
]
IDS = [f"{Path(c['file']).stem}: {c['description']}" for c in CASES]
# Random text is rarely an object, and rarely closes what it has opened: the marks get a push.
PUSHED = {'"': 5.0, "{": 6.0, "[": 5.0, "}": 4.0, "]": 4.0, ":": 3.0, ",": 3.5, "1": 1.0}


@functools.cache
def tokenizer() -> Tokenizer:
    return tiny_tokenizers.byte_level()


@functools.cache
def constraints() -> Constraints:
    return Constraints(tokenizer(), VOCABULARY)


def compiled(schema: object) -> Constraint | None:
    """None where it is refused."""
    try:
        return constraints().json_schema(schema, whitespace="compact")
    except ConstraintError:
        return None


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_instances(case: dict[str, Any]) -> None:
    """No invalid instance is a text of the grammar; a refusal names the keyword, and where it stands."""
    schema = case["schema"]
    if "refused" in case:
        with pytest.raises(ConstraintError) as refusal:
            constraints().json_schema(schema, whitespace="compact")
        assert case["refused"] in str(refusal.value)
        assert refusal.value.keywords == (re.match(r"[$\w]+", case["refused"])[0],)
        return
    built = compiled(schema)
    assert built is not None
    for each in case["tests"]:
        text = json.dumps(each["data"], separators=(",", ":"), ensure_ascii=False)
        state = built.start()
        ids = [*tokenizer().encode(text, add_special_tokens=False), 1]
        if not each["valid"]:
            assert not all(state.advance(i) for i in ids), f"{text} is allowed"


def test_most_valid_instances_are_texts() -> None:
    """A grammar that allowed nothing would break no schema; properties have a fixed order, so not all are."""
    valid = taken = 0
    for case in CASES:
        built = compiled(case["schema"])
        for each in case["tests"] if built is not None else ():
            if each["valid"]:
                text = json.dumps(each["data"], separators=(",", ":"), ensure_ascii=False)
                state = built.start()
                valid += 1
                ids = [*tokenizer().encode(text, add_special_tokens=False), 1]
                taken += all(state.advance(i) for i in ids)
    assert valid > 80
    assert taken > 0.95 * valid


def asked(index: int, built: Constraint) -> Request:
    bias = {tokenizer().encode(t, add_special_tokens=False)[0]: v for t, v in PUSHED.items()}
    params = SamplingParams(
        temperature=1.0, seed=index, max_tokens=50, logit_bias={**bias, 1: 9.0}, top_p=0.95
    )
    return Request(
        id=str(index),
        prompt_ids=tokenizer().encode('{"the quick":"fox","foo":[1,2,"bar"]}', False),
        params=params,
        stop_ids=frozenset({1}),
        grammar=built.start(),
    )


def answers(folder: Path, method: str, *, gpu: bool = False) -> dict[str, Outcome]:
    """An answer to every schema that is accepted."""
    eng = engine(folder, method=method, max_rows=16, prompt_lookup_min=1)
    if gpu:
        as_on_gpu(eng)
    built = [compiled(case["schema"]) for case in CASES]
    found = run(eng, [asked(i, c) for i, c in enumerate(built) if c is not None])
    if method != "none":
        assert eng.report()["spec_decode_num_accepted_tokens"] > 60
        assert eng.report()["spec_decode_num_forced_tokens"] > 20
    return found


def test_answers_validate(tmp_path: Path) -> None:
    """Sampled with trees, every finished answer is an instance; one that was cut is the beginning of one."""
    folder = tiny.write_tiny(tmp_path / "target", "llama", seed=3, vocab_size=VOCABULARY)
    found = answers(folder, "suffix")
    assert {k: o.tokens for k, o in answers(folder, "none").items()} == {
        k: o.tokens for k, o in found.items()
    }
    assert {k: o.tokens for k, o in answers(folder, "suffix", gpu=True).items()} == {
        k: o.tokens for k, o in found.items()
    }
    finished = []
    for key, outcome in found.items():
        schema = CASES[int(key)]["schema"]
        state = compiled(schema).start()
        assert all(state.advance(t) for t in outcome.tokens), "no beginning of an answer"
        if outcome.last.finish_reason is FinishReason.STOP:
            text = tokenizer().decode(outcome.tokens[:-1])
            judge = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
            judge.validate(json.loads(text))
            finished.append(text)
        else:
            assert outcome.last.finish_reason is FinishReason.LENGTH
    assert len(found) == 40
    assert len(finished) > 35
    assert len(set(finished)) > 18


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """benchmarks/json_schemas.py, which does this with the whole suite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("json_schemas")


def test_the_script_counts_and_finds_what_is_wrong(script: ModuleType, tmp_path: Path) -> None:
    """A refusal by keyword, answers that validate, and those of a grammar that is another schema's."""
    bench = script.prepared(tmp_path / "model", 2, 40, ["compact"])
    told = {"file": "a/enum.json", "description": "one", "schema": {"enum": ["aa", [1, 2]]}}
    told["tests"] = [{"data": "aa", "valid": True}, {"data": "b", "valid": False}]
    other = {**told, "schema": {"contains": {}}, "description": "other"}
    found = script.measure([told, other], bench)
    assert (found["cases"], found["accepted"], found["refused"]) == (2, 1, 1)
    assert found["refused_for"] == {"contains": 1}
    answers = {"made": 2, "finished": 2, "validated": 2, "cut": 0, "unequal": 0}
    assert answers.items() <= found["answers"].items()
    assert found["instances"] == {
        "invalid": 1,
        "invalid_allowed": 0,
        "valid": 1,
        "valid_allowed": 1,
    }
    assert (found["unanswered"], found["failures"]) == (0, [])

    class Liar:
        """Takes whatever is asked for another schema."""

        def json_schema(self, _: object, *, whitespace: Any) -> Constraint:
            return bench.constraints.json_schema({"enum": ["b"]}, whitespace=whitespace)

    found = script.measure([told], replace(bench, constraints=Liar()))
    assert found["instances"]["invalid_allowed"] == 1
    assert found["answers"]["finished"] == 2
    assert found["answers"]["validated"] == 0
    assert len(found["failures"]) == 3
    assert 'enum: one: "b" is invalid, and allowed' in found["failures"]


JUDGED = [
    ('{"a": 1}', None),
    ('{"a": "x"}', "does not validate: 'x' is not of type 'integer'"),
    ('{"a": 1, "a": 2}', "a name twice"),
    ('{"a": 1', "is no answer"),
]


@pytest.mark.parametrize("text,told", JUDGED)
def test_the_script_s_judge(script: ModuleType, text: str, told: str | None) -> None:
    """What is right, wrong, twofold and broken."""
    found, who = script.verdict({"properties": {"a": {"type": "integer"}}}, text)
    assert who == "jsonschema"
    assert (found is None) if told is None else (told in found)


def test_the_script_s_second_judge(script: ModuleType) -> None:
    """For a regex that Python cannot read."""
    schema = {"pattern": r"^\p{Letter}+$"}
    assert script.verdict(schema, '"aé"') == (None, "jsonschema_rs")
    assert "does not validate" in script.verdict(schema, '"a1"')[0]
