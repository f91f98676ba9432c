"""Regular expressions that llguidance would read otherwise than their author, or that force endless text.

Not here: what its parser refuses itself: look-around, back-references, anchors within, what is not closed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.api.grammar_text import MAX_TEXT, ConstraintError

_COUNT = re.compile(r"\{\s*(\d+)\s*(?:,\s*\d*\s*)?\}")
_GROUP = re.compile(r"\(\?(?:P?<\w+>|([A-Za-z-]*)([:)]))")
# Texts and remarks, in which a slash begins nothing, and what is between slashes.
_IN_LARK = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/((?:[^/\\\n]|\\.)+)/')
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_CODE = re.compile(r"\\(?:[xuUpP]\{[^}]*\}|x..|u....|U........|.)", re.DOTALL)


def check_regex(kind: str, pattern: str) -> None:
    """Refuse what has another meaning elsewhere than it would have here.

    Raises:
        ConstraintError: says what, and what to write instead.
    """
    if longest(kind, pattern) > MAX_TEXT:
        msg = (
            f"the {kind} repeats so often that more than {MAX_TEXT} characters must come in one go; at most "
            f"{MAX_TEXT} are possible; lower the counts in braces"
        )
        raise ConstraintError(msg)


def regexes(grammar: str) -> list[str]:
    """The regular expressions of a grammar in Lark's syntax."""
    found = _IN_LARK.finditer(grammar)
    return [match[1] for match in found if match[1] is not None]


def patterns(schema: object, *, named: bool = False) -> Iterator[str]:
    """The regular expressions of a JSON schema.

    Args:
        schema: with whatever is within it.
        named: it is an object of schemas by name.
    """
    if isinstance(schema, list):
        for one in schema:
            yield from patterns(one)
    elif isinstance(schema, Mapping):
        for key, value in schema.items():
            if key == "patternProperties" and not named and isinstance(value, Mapping):
                yield from value
            if key == "pattern" and not named and isinstance(value, str):
                yield value
            if named or key not in ("const", "enum", "default", "examples", "example"):
                yield from patterns(value, named=key in _NAMED and not named)


@dataclass(slots=True)
class _Group:
    """What is known of a group while it is read; lengths in characters that must come."""

    best: int = 0  # of the alternatives before
    before: int = 0  # of this one, without the last item
    last: int = 0  # of the last item

    def put(self, length: int) -> None:
        self.before += self.last
        self.last = length

    def next(self) -> None:
        self.best = max(self.best, self.before + self.last)
        self.before = self.last = 0


def longest(kind: str, pattern: str) -> int:
    """Characters of the longest text that must come once a regex has been entered anywhere, about.

    Raises:
        ConstraintError: it ends in a backslash, has a possessive quantifier, or sets the flag x.
    """
    groups = [_Group()]
    at, quantified = 0, False
    while at < len(pattern):
        character, start = pattern[at], at
        at += 1
        repeated = False
        if character in "\\[":
            at = (
                _after_escape(kind, pattern, start)
                if character == "\\"
                else _after_class(kind, pattern, start)
            )
            groups[-1].put(1)
        elif character == "(":
            head = _GROUP.match(pattern, start)
            if head is not None:
                at = head.end()
                if "x" in (head[1] or "").partition("-")[0]:
                    raise _refused(kind, "sets the flag x", "write it without blanks and remarks")
            if head is None or head[2] != ")":
                groups.append(_Group())
        elif character == ")":
            if len(groups) > 1:  # the library tells of others
                group = groups.pop()
                group.next()
                groups[-1].put(group.best)
        elif character == "|":
            groups[-1].next()
        elif character in "*+?":
            if quantified and character == "+":
                words = (
                    "a group, (?:a+)+, says that it is repeated; take one, or a single quantifier"
                )
                raise _refused(kind, f"has a possessive quantifier at {start}", words)
            repeated = True
        elif count := _COUNT.match(pattern, start):
            at = count.end()
            groups[-1].last = min(groups[-1].last * max(1, int(count[1][:9])), 1 << 62)
            repeated = True
        else:
            groups[-1].put(1)
        quantified = repeated
    for group in groups:
        group.next()
    return max(group.best for group in groups)


def _after_escape(kind: str, pattern: str, start: int) -> int:
    code = _CODE.match(pattern, start)
    if code is None:
        raise _refused(kind, "ends in a backslash", r"write \\ for one")
    return code.end()


def _after_class(kind: str, pattern: str, start: int) -> int:
    """Where a class of characters ends; the pattern's end where it does not."""
    depth, at = 0, start
    while at < len(pattern):
        if pattern[at] == "\\":
            if at + 1 == len(pattern):
                raise _refused(kind, "ends in a backslash", r"write \\ for one")
            at += 1
        elif pattern[at] == "[":
            depth += 1
            at += pattern[at + 1 : at + 2] == "^"
            at += pattern[at + 1 : at + 2] == "]"  # the first one is a character
        elif pattern[at] == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return at


def _refused(kind: str, what: str, instead: str) -> ConstraintError:
    msg = f"the {kind} {what}, which means nothing here or something else than elsewhere; {instead}"
    return ConstraintError(msg)
