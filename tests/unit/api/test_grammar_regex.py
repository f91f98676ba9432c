"""Regular expressions: what is served means what Python's `re` means by it, and forces no endless text."""

from __future__ import annotations

import itertools
import random
import re
import warnings

import pytest

from paceline.api.grammar import ConstraintError, Constraints
from paceline.api.grammar_regex import longest
from paceline.api.grammar_text import MAX_TEXT
from paceline.api.tokenizer import Tokenizer
from tests import tiny_tokenizers

TEXTS = ["".join(t) for size in range(5) for t in itertools.product("ab", repeat=size)]
ATOMS = ["a", "b", "[ab]", "[^a]", ".", "(?:)", r"\x61", "[^ab]", "a", "b"]
REPEATS = ["*", "+", "?", "{2}", "{1,2}", "*?", "+?", "??", "{0}", "{2,}", "++", "*+"]
ODD = [
    "^",
    "$",
    "(?i)",
    r"\b",
    "(?=a)",
    "(?i:a)",
    "(?s:.)",
    "(?m)",
    r"\A",
    r"\B",
    "(?>a)",
    "{",
    "/",
    '"',
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizers.byte_level()


@pytest.fixture(scope="module")
def constraints(tokenizer: Tokenizer) -> Constraints:
    return Constraints(tokenizer, 416)


def drawn(draw: random.Random, depth: int) -> str:
    """A regex, mostly well formed."""
    kind = draw.random() if depth else 0.0
    if kind < 0.25:
        return draw.choice(ATOMS)
    one = drawn(draw, depth - 1)
    if kind < 0.5:
        return one + drawn(draw, depth - 1)
    if kind < 0.7:
        return f"({one}|{drawn(draw, depth - 1)})"
    if kind < 0.92:
        return f"(?:{one}){draw.choice(REPEATS)}"
    return draw.choice(ODD) + one


def test_a_regex_is_what_python_says(constraints: Constraints, tokenizer: Tokenizer) -> None:
    """All short texts of two letters; what one of the two readers does not take is not compared."""
    draw, compared, ids = random.Random(1), 0, {}
    for letter in "ab":
        ids[letter] = tokenizer.encode(letter, add_special_tokens=False)[-1]
        assert tokenizer.token_bytes(ids[letter]) == letter.encode()
    for _ in range(400):
        pattern = drawn(draw, 4)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                oracle = re.compile(pattern)
            built = constraints.regex(pattern)
        except (re.error, ConstraintError):
            continue
        compared += 1
        for text in TEXTS:
            state = built.start()
            taken = all(state.advance(ids[letter]) for letter in text)
            fits = taken and state.advance(tokenizer.eos_token_ids[0])
            assert fits == (oracle.fullmatch(text) is not None), (pattern, text)
    assert compared > 200


@pytest.mark.parametrize(
    "pattern, told",
    [
        ("\\", "ends in a backslash"),
        ("a\\", "ends in a backslash"),
        ("\\\\\\", "ends in a backslash"),
        ("[a\\", "ends in a backslash"),
        ("a++b", "possessive quantifier at 2"),
        ("(ab)*+", "possessive quantifier at 5"),
        ("a{2}+", "possessive quantifier at 4"),
        ("(?x)a b", "sets the flag x"),
        ("(?ix:a b)", "sets the flag x"),
        ("x{1000000}", f"more than {MAX_TEXT} characters"),
        ("(x{1000}){1000}", f"more than {MAX_TEXT} characters"),
        ("a|(b{20000})?", f"more than {MAX_TEXT} characters"),
        ("x{99999999999999999999}", f"more than {MAX_TEXT} characters"),
    ],
)
def test_what_means_something_else(constraints: Constraints, pattern: str, told: str) -> None:
    """Refused wherever a regex may stand."""
    lark = f"start: /{pattern}/"
    calls = [
        lambda: constraints.regex(pattern),
        lambda: constraints.json_schema({"items": {"type": "string", "pattern": pattern}}),
        lambda: constraints.json_schema({"patternProperties": {pattern: {}}}),
    ]
    if not pattern.endswith("\\"):  # there a slash would be escaped by it
        calls.append(lambda: constraints.lark(lark))
    for call in calls:
        with pytest.raises(ConstraintError, match=f"(regex|pattern).* {re.escape(told)}.*; "):
            call()


@pytest.mark.parametrize(
    "pattern, text",
    [
        (r"\\", "\\"),
        (r"a\+b", "a+b"),
        ("[+]+?", "+"),
        ("[]+]+", "]+"),
        (r"[\]]+", "]]"),
        ("(?:a+)+", "aaa"),
        ("(?i-x)ab", "AB"),
        ("(?P<x>a)b", "ab"),
        ("a/b", "a/b"),
        ("a\nb", "a\nb"),
        ("^ab$", "ab"),
        (r"\x{61}+", "aa"),
        ("{2}"[1:], "2}"),
    ],
)
def test_what_looks_alike_is_served(
    constraints: Constraints, tokenizer: Tokenizer, pattern: str, text: str
) -> None:
    """Escapes, classes and groups are not taken for what is refused."""
    state = constraints.regex(pattern).start()
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size - 1, -1, -1)}
    assert all(state.advance(single[bytes([byte])]) for byte in text.encode())
    assert state.advance(tokenizer.eos_token_ids[0])


def test_texts_and_remarks_of_a_grammar_are_no_regexes(constraints: Constraints) -> None:
    """Only what stands between slashes is one."""
    for grammar in ('start: "a" // x / y /++/\n', 'start: "/++/" /a/', r'start: /a\/b+/ "x++"'):
        constraints.lark(grammar)


@pytest.mark.parametrize(
    "pattern, length",
    [
        ("", 0),
        ("abc", 3),
        ("a|bcd|ef", 3),
        ("(a{3}b){4}", 16),
        ("[a-z]{5}", 5),
        ("a{2,9}", 2),
        ("(ab)?c*", 3),
        (r"\x61\u{62}\pL\p{Lu}\.", 6),
        ("(?i)a(?:b)(?<n>c)", 3),
        ("((a|bc){2}){3}d", 13),
        ("a{0,1000}", 1),
    ],
)
def test_lengths(pattern: str, length: int) -> None:
    """About what must come: alternatives by the longest, optional items once."""
    assert longest("regex", pattern) == length
