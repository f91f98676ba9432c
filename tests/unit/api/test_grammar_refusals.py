from __future__ import annotations

import random
import sys
from contextlib import suppress
from typing import Any

import llguidance
import pytest

from paceline.api.completion import Completion, started
from paceline.api.grammar import ConstraintError, Constraints
from paceline.api.grammar_state import GrammarFailedError
from paceline.api.grammar_text import MAX_TEXT
from paceline.core.errors import ConfigError, RequestError
from paceline.core.request import SamplingParams
from tests import grammars, tiny_tokenizers


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    """For a model of 416 ids."""
    return Constraints(tiny_tokenizers.byte_level(), 416)


REFUSED: dict[str, tuple[str, Any, str]] = {
    "keyword": ("json_schema", {"type": "array", "uniqueItems": True}, r"uniqueItems \(at #\)"),
    "deep": (
        "json_schema",
        {"properties": {"a/b": {"items": [{}, {"not": {}}], "if": {}}}},
        r"if \(at #/properties/a~1b\)",
    ),
    "two keywords": ("json_schema", {"contains": {}, "minContains": 2}, "contains.*minContains"),
    "oneOf": (
        "json_schema",
        {"items": {"oneOf": [{"minimum": 3}, {"type": "integer"}]}},
        r"oneOf \(at #/items\).* or write anyOf$",
    ),
    "a property's name is no keyword": (
        "json_schema",
        {"properties": {"not": {"not": {}}}, "enum": [{"not": 1}]},
        r"not \(at #/properties/not\),",
    ),
    "more than once": (
        "json_schema",
        {"allOf": [{"not": {"type": "string"}}, {"not": {"type": "array"}}]},
        r"not \(at #/allOf/0, and 1 more\)",
    ),
    "format": ("json_schema", {"items": {"format": "iri"}}, r"format \(at #/items\).*iri"),
    "false among others": (
        "json_schema",
        {"anyOf": [{"allOf": [{}, {"$ref": "#/$defs/a~1b"}]}], "$defs": {"a/b": False}},
        r"\$ref \(at #/\$defs/a~1b\): that schema is false",
    ),
    "counts of properties": (
        "json_schema",
        {"properties": {"a": {}}, "minProperties": 1},
        r"minProperties \(at #\)",
    ),
    "a dialect": (
        "json_schema",
        {"$schema": "http://example.org/own", "type": "string"},
        r"\$schema \(at #\): http://example.org/own is another document",
    ),
    "nothing fits": ("json_schema", {"type": "integer", "minimum": 4, "maximum": 3}, "minimum"),
    "false": ("json_schema", False, "false, which nothing fits"),
    "too many ways to go on": (
        "json_schema",
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(700)}},
        "so many alternatives",
    ),
    "no values": ("json_schema", {"enum": []}, "enum is empty"),
    "in another schema": (
        "json_schema",
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        r"\$dynamicAnchor \(in a schema that it refers to\)",
    ),
    "a number": ("json_schema", 3, "an object"),
    "no JSON": ("json_schema", '{"type": ', "no JSON"),
    "no JSON values": ("json_schema", {"const": {1, 2}}, "JSON values"),
    "NaN": ("json_schema", {"const": float("nan")}, "JSON values"),
    "a remote schema": (
        "json_schema",
        {"$ref": "http://example.org/x.json"},
        r"\$ref \(at #\): http://example.org",
    ),
    "look-around": ("regex", "a(?=b)", "look-ahead"),
    "open group": ("regex", "(a", "unclosed group"),
    "no string": ("regex", 5, "a string"),
    "unknown rule": ("lark", "start: thing", 'unknown name: "thing"'),
    "GBNF": ("lark", "root ::= [0-9 foo", "GBNF"),
    "no choices": ("choice", [], "at least one"),
    "a text for choices": ("choice", "abc", "a list"),
    "numbers for choices": ("choice", [1, 2], "a list"),
    "too many choices": ("choice", ["a"] * 10_001, "10001"),
    "too long": (
        "json_schema",
        {"enum": ["ab" * 3000] * 50},
        "the JSON schema has 300[0-9]{3} char",
    ),
    "too long a regex": ("regex", "a" * (MAX_TEXT + 1), "the regex has 16385 characters"),
    "too long a text": (
        "json_schema",
        {"const": "é" * 18_000},
        "a text in the JSON schema has 18000",
    ),
    "too long a choice": ("choice", ["a", "b" * 20_000], "a text in the choice has 20000"),
    "too many rules": (
        "lark",
        "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(8000)) + 'r8000: "a"',
        "8002 rules",
    ),
    "too many references": (
        "json_schema",
        {"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(4000)}},
        "4000 references",
    ),
    "too deep": ("json_schema", "[" * 100_000, "no JSON"),
    "too deep for lark": ("lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "too deeply"),
    "too deep for GBNF": ("lark", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, "GBNF"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_names_the_place(constraints: Constraints, case: str) -> None:
    """A client learns what to change; other requests are not disturbed."""
    kind, given, told = REFUSED[case]
    with pytest.raises(ConstraintError, match=f"(?s){told}") as caught:
        getattr(constraints, kind)(given)
    assert isinstance(caught.value, RequestError)
    assert ";" in str(caught.value), "what was asked; what is possible; what to do"
    assert len(str(caught.value)) < 1_000


def test_numbers_that_are_kept(constraints: Constraints) -> None:
    """Whole ones as far as a float holds them all, further ones that end in zeros, decimals."""
    for value in (2**53, -(2**53), 10**18, 1e15, -0.0, 2.0, 0.25, 1e-7):
        constraints.json_schema({"const": value})


HARD = {
    "long": "x{100000}",
    "classes": r"(\p{L}{1,900}\p{N}{1,900}){900}x",
    "counts": "(.{1,5000}a){50}",
    "ways": "(a|b|ab)*c" * 99,
}


def masked(constraints: Constraints, pattern: str, count: int = 30) -> None:
    """Masks along a random text of a regex."""
    draw, state = random.Random(1), constraints.regex(pattern).start()
    for _ in range(count):
        mask = int.from_bytes(state.mask(), "little")
        tokens = [t for t in range(mask.bit_length()) if mask >> t & 1]
        state.advance(draw.choice(tokens))


@pytest.mark.parametrize("name", HARD)
def test_hard_regexes_are_served_or_given_up(constraints: Constraints, name: str) -> None:
    """Whatever happens is told as what it is; nothing else is raised."""
    with suppress(ConstraintError, GrammarFailedError):
        masked(constraints, HARD[name])


@pytest.mark.parametrize("name", [name for name in HARD if name != "long"])
def test_the_work_of_a_regex_is_bounded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """llguidance counts its own work, and gives up at the limits that it is given: with less, all of these."""
    monkeypatch.setattr("paceline.api.grammar._START_FUEL", 100)
    monkeypatch.setattr("paceline.api.grammar._STEP_FUEL", 100)
    tight = Constraints(tiny_tokenizers.byte_level(), 416)
    with pytest.raises((ConstraintError, GrammarFailedError), match=r"too big|too many"):
        masked(tight, HARD[name])
    masked(tight, "ab", 2)


def test_every_limit_reaches_the_matcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the numbers that bound the work is lost on its way."""
    given = {}

    def limits(**values: object) -> object:
        given.update(values)
        return made(**values)

    made = llguidance.LLParserLimits
    monkeypatch.setattr(llguidance, "LLParserLimits", limits)
    built = Constraints(tiny_tokenizers.byte_level(), 416)
    assert isinstance(built._limits, made)
    numbers = {name: value for name, value in given.items() if name != "verbose_errors"}
    assert len(numbers) == 5
    assert all(isinstance(value, int) and 0 < value <= 1_000_000 for value in numbers.values())


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance is an extra: who lacks it is told what to install."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"paceline\[server\]"):
        Constraints(grammars.tokenizer(), grammars.VOCABULARY)


def test_a_model_without_an_end() -> None:
    """Where no token ends a text no answer could be complete."""
    with pytest.raises(ConstraintError, match="end-of-text"):
        Constraints(grammars.tokenizer(), grammars.VOCABULARY, ())


def test_an_answer_ends_with_its_grammar() -> None:
    """`ignore_eos` is the grammar's to keep: an id that it allows at its end must end the answer."""
    params = SamplingParams(ignore_eos=True, stop_token_ids=(7,))
    state = grammars.constraint("form").start(ignore_eos=True)
    for grammar, stops in ((state, {2, 7}), (None, {7})):
        made = Completion(
            "1", [5], params, grammars.tokenizer(), eos_token_ids=frozenset({2}), grammar=grammar
        )
        assert made.request.stop_ids == stops
        assert made.request.grammar is grammar


@pytest.mark.parametrize("given", ["[a-z]+", {"type": "object"}, 5])
def test_what_is_no_constraint_is_told_what_is(given: Any) -> None:
    """In three parts, before anything is submitted."""
    with pytest.raises(RequestError, match=r"constraint is .*LLM\.constraints has compiled.*pass"):
        started(given)


def test_a_started_grammar_is_no_constraint(constraints: Constraints) -> None:
    """Two answers would move one state."""
    with pytest.raises(RequestError, match="before start"):
        started(constraints.regex("a").start())
    assert started(None) is None
    assert started(constraints.regex("a")) is not None
