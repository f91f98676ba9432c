"""What a client may ask a constraint to be made of, as far as it is checked before llguidance.

Sizes are checked before llguidance sees anything: it follows rules that name rules by recursion, and a long
text that is forced is tokenized whole.

Not here: what llguidance itself refuses (grammar_refusals.py), compiling (grammar.py).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence

from paceline.core.errors import RequestError, quoted

MAX_CHARACTERS = 1 << 18  # of a schema or grammar
MAX_TEXT = (
    1 << 14
)  # characters of a regex, or of a text in a schema or grammar: it may be one forced run
MAX_CHOICES = 10_000
MAX_RULES = 1_000  # llguidance follows rules that name rules by recursion
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_LARGEST = int(sys.float_info.max)
_EXACT = 1 << 53  # below it every whole number is a float of its own


class ConstraintError(RequestError):
    """A schema, regex or grammar that cannot be served; the message names the keyword or the place.

    Args:
        message: what was asked, what is possible, what to do.
        keywords: what a schema is refused for, if it is for keywords; each stands in the message.
    """

    def __init__(self, message: str, keywords: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.keywords = tuple(keywords)


def read_schema(schema: object) -> Mapping[str, object]:
    """A schema as an object of JSON values.

    Raises:
        ConstraintError: it is none, or too large.
    """
    if isinstance(schema, str):
        check_size("JSON schema", schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            msg = f"the JSON schema is no JSON: {error}; pass an object, or its JSON text"
            raise ConstraintError(msg) from error
    if schema is True:
        return {}
    if schema is False:
        msg = (
            "the JSON schema is false, which nothing fits; an object or true is possible; pass one"
        )
        raise ConstraintError(msg, ["false"])
    if not isinstance(schema, Mapping):
        msg = f"the JSON schema is {quoted(schema)}; an object or true is possible; pass an object"
        raise ConstraintError(msg)
    try:
        text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        msg = f"the JSON schema cannot be written as JSON: {error}; pass JSON values only"
        raise ConstraintError(msg) from error
    check_size("JSON schema", text)
    check_rules("JSON schema", "references ($ref)", text.count('ref"'))
    # JSON has one kind of number: maxItems may be 2.0, which llguidance would not take.
    read: Mapping[str, object] = json.loads(text, parse_float=_number, parse_int=_whole)
    return read


def _whole(text: str) -> int:
    value = int(text)
    if abs(value) > _LARGEST:
        msg = (
            f"the JSON schema has a number of {len(text)} digits; numbers up to 1.8e308 are possible; "
            "write a smaller one"
        )
        raise ConstraintError(msg)
    return value


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


def check_size(kind: str, text: object) -> None:
    """Refuse what is no text of Unicode, or too long a one.

    Raises:
        ConstraintError: with the most that is possible.
    """
    if not isinstance(text, str):
        msg = f"the {kind} is {quoted(text)}; a string is possible; pass one"
        raise ConstraintError(msg)
    if any("\ud800" <= character <= "\udfff" for character in set(text)):
        msg = f"the {kind} has unpaired surrogates, which no answer holds; clean it first"
        raise ConstraintError(msg)
    texts = [m.end() - m.start() - 2 for m in _TEXT.finditer(text)]
    for what, size, most in (
        ("the", len(text), MAX_TEXT if kind == "regex" else MAX_CHARACTERS),
        ("a text in the", max(texts, default=0), MAX_TEXT),
    ):
        if size > most:
            msg = f"{what} {kind} has {size} characters; at most {most} are possible; pass a shorter one"
            raise ConstraintError(msg)


def check_rules(kind: str, what: str, count: int) -> None:
    """Refuse too many rules that name others.

    Raises:
        ConstraintError: with the most that is possible.
    """
    if count > MAX_RULES:
        msg = (
            f"the {kind} has {count} {what}; at most {MAX_RULES} are possible; write it with fewer"
        )
        raise ConstraintError(msg)


def lark_of_gbnf(grammar: str) -> str:
    """A GBNF grammar in Lark's syntax.

    Raises:
        ConstraintError: it is malformed; the message says where.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # the library raises plain Exception
        msg = f"the grammar is no GBNF: {error}; correct it, or write it in Lark's syntax"
        raise ConstraintError(msg) from error
