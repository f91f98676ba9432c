"""Grammars for calls of functions, in Lark's syntax as llguidance reads it.

    forced   the answer is one call or several
    lazy     the answer is text; what begins as a call must go on as one
    either   the answer is calls, or has a format of its own

Reasoning may come first: as much as the model likes, up to the mark that ends it. Arguments follow each
function's JSON schema, spaced as models are trained to write it. A mark that is a token of its own is
that token, never its letters.
Not for: compiling (paceline.api.grammar).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.api.grammar import LAYOUTS, Whitespace
from paceline.api.server.reasoning import ThinkForm, Thinking
from paceline.api.server.tool_parsers.dialects import COUNT, NAME, Dialect

_COUNT = "/[0-9]{1,4}/"
Quote = Callable[[str], str]  # a text with marks in it, as symbols of a grammar
_RULES = """
SPACE: /[ \\n\\r\\t]{1,8}/
TEXT: /(?s:.*)/
SOME: /(?s:.+)/
TALK: TEXT%(no_thought)s
SOME_TALK: SOME%(no_thought)s
NO_OBJECT: /[^{\\s](?s:.*)/%(no_thought)s
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A function as grammars see it."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """Writes grammars for one dialect.

    Args:
        dialect: how calls are written.
        functions: those that may be called; at least one.
        single: one call at most.
        token_id: id of a special token by its text; None: it is no token of its own.
    """

    dialect: Dialect
    functions: Sequence[Signature]
    single: bool
    token_id: Callable[[str], int | None]

    def forced(self) -> str:
        """Rules for `answer`: calls and nothing else."""
        return f"answer: calls\n{self._calls()}"

    def either(self, form: str) -> str:
        """Rules for `answer`: calls, or the symbols of a format.

        Where calls have no trigger they get a mark, as a format may begin as a call does.
        """
        mark = "" if self.dialect.trigger else self._quote(self.dialect.marks[0])
        return f"answer: {mark} calls | form\nform: {form}\n{self._calls()}"

    def lazy(self) -> str:
        """Rules for `answer`: text with calls in it, or without."""
        trigger = self.dialect.trigger
        if not trigger:  # a call is the whole answer, or the answer begins otherwise
            return f"answer: calls | talk?\ntalk: NO_OBJECT\n{self._calls()}"
        token = self.token_id(trigger)
        if token is None:
            head, talk = f"head[lazy]: TALK {self._quote(trigger)}", "talk: TALK"
        else:
            head, talk = f"head: SOME_TALK? <[{token}]>", "talk: SOME_TALK?"
        block = "block" if self.dialect.closes is None else "section"
        if self.single:  # after the call nothing is left to say
            answer = f"answer: head {block} | talk"
        else:
            answer = f"answer: (head {block}){'*' if block == 'block' else '?'} talk"
        return f"{answer}\n{head}\n{talk}\n{self._calls()}"

    def _calls(self) -> str:
        """`calls` with their triggers; `block` and `section`: what follows a trigger."""
        quote, dialect = self._quote, self.dialect
        again = "" if self.single else f"({quote(dialect.between)} %s)*"
        if dialect.closes is None:
            one = f"{quote(dialect.trigger)} block"
            calls = f"{one} {again % one if again else ''}"
            rules = [f"calls: {calls}", "block: call"]
        else:
            rules = [
                f"calls: {quote(dialect.trigger)} section",
                f"section: call {again % 'call' if again else ''} {quote(dialect.closes)}",
            ]
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(self.functions))))
        for index, function in enumerate(self.functions):
            before = f" {_COUNT} ".join(
                quote(part) for part in dialect.before.replace(NAME, function.name).split(COUNT)
            )
            rules.append(f"call_{index}: {before} arguments_{index} {quote(dialect.after)}")
            rules.append(f"arguments_{index}: {json_rule(function.schema, 'spaced')}")
        return "\n".join(rules)

    @property
    def _quote(self) -> Quote:
        return quoting(self.dialect.marks, self.token_id)


def quoting(marks: Sequence[str], token_id: Callable[[str], int | None]) -> Quote:
    """A function that writes a text as symbols of a grammar: strings, and tokens for marks."""
    tokens = {mark: i for mark in marks if (i := token_id(mark)) is not None}
    pattern = "|".join(re.escape(mark) for mark in tokens)

    def quote(text: str) -> str:
        parts = re.split(f"({pattern})", text) if tokens else [text]
        return " ".join(
            f"<[{tokens[part]}]>" if part in tokens else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    return quote


def grammar(
    rules: str, think: ThinkForm | None, thinking: Thinking, token_id: Callable[[str], int | None]
) -> str:
    """A whole grammar from rules for `answer`, which reasoning may precede."""
    start, no_thought = "start: answer", ""
    if think is not None and thinking is not Thinking.CLOSED:
        quote = quoting((think.opens, think.closes), token_id)
        token = token_id(think.closes)
        if token is None:
            thought = f"thought[lazy]: TEXT {quote(think.closes)}"
        else:
            thought = f"thought: SOME? <[{token}]>"
        if thinking is Thinking.OPEN:
            opened = "thought"
        elif token_id(think.opens) is not None:
            opened = f"(SPACE? {quote(think.opens)} thought)?"
        else:
            # One piece with the space before it, and what begins so is no text in which calls count:
            # of several pieces that fit, the longest is taken.
            begin = re.escape(think.opens)
            opened = f"(/[ \\n\\r\\t]{{0,8}}{begin}/ thought)?"
            no_thought = f" & ~/\\s*{begin}(?s:.*)/"
        start = f"start: {opened} SPACE? answer\n{thought}"
    return f"%llguidance {{}}\n{start}\n{rules}\n{_RULES % {'no_thought': no_thought}}"


def json_rule(schema: Mapping[str, Any] | bool, whitespace: Whitespace) -> str:
    """Symbols for JSON of a schema."""
    fields: Mapping[str, Any] = (
        schema if isinstance(schema, Mapping) else ({} if schema else {"not": {}})
    )
    return "%json " + json.dumps({**fields, "x-guidance": LAYOUTS[whitespace]})


def choice_rule(choices: Sequence[str]) -> str:
    """Symbols for one of several texts."""
    return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def regex_rule(pattern: str) -> str:
    """Symbols for a regular expression."""
    written = re.sub(r"\\.|/|\n", lambda m: _IN_REGEX.get(m[0], m[0]), pattern, flags=re.DOTALL)
    return f"/{written}/"


_IN_REGEX = {"/": r"\/", "\n": r"\n"}


def lark_rule(source: str) -> str:
    """Symbols for a grammar within the grammar."""
    return f"%lark {{\n{source}\n}}"
