"""Constraints: what an answer's text must look like, compiled for one model's tokens by `llguidance`.

    constraints = Constraints(tokenizer, vocab_size)
    constraint = constraints.json_schema({"type": "object", ...})
    request = Request(..., grammar=constraint.start())

A `Constraint` is compiled once and shared; `start` gives each request, and each of its samples, a state of
its own. Compiling is bounded in the size of what is given and in the work that it may cause, and keeps
nothing of the engine's, so it may run in any thread. llguidance is part of the extra `server`.

Not here: what may be asked (grammar_text.py, grammar_numbers.py, grammar_regex.py), what is told of a refusal (grammar_refusals.py), the state as steps move it (grammar_state.py), how steps use
it (engine/guides.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from paceline.api.grammar_numbers import check_numbers
from paceline.api.grammar_refusals import refusal
from paceline.api.grammar_regex import check_regex, patterns, regexes
from paceline.api.grammar_state import MatcherGrammar, Matchers
from paceline.api.grammar_text import (
    MAX_CHOICES,
    ConstraintError,
    check_rules,
    check_size,
    lark_of_gbnf,
    read_schema,
)
from paceline.core.errors import ConfigError, quoted
from paceline.core.request import Constraint, Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from paceline.api.tokenizer import Tokenizer

__all__ = ["LAYOUTS", "ConstraintError", "Constraints", "Whitespace"]

Whitespace = Literal["flexible", "spaced", "compact"]

# JSON allows any amount of whitespace; a model that has lost its thread would go on with it for ever.
_FLEXIBLE = r"[\x20\x0A\x0D\x09]{1,64}"
LAYOUTS: Mapping[Whitespace, JsonCompileOptions] = {
    "flexible": {"whitespace_pattern": _FLEXIBLE},
    "spaced": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "compact": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
}
# Of the work that a grammar may cause; what a schema of many kilobytes needs is far below.
_START_FUEL, _STEP_FUEL = 1_000_000, 200_000  # of the lexer: some 20 ms, and 14 ms for a mask
_STEP_ITEMS = 50_000  # of the parser, for a mask
_LEXER_STATES = 50_000  # 1 to 2 kB each
_GRAMMAR_SIZE = 200_000  # symbols
_LONG, _TRIED = 4096, 4  # characters from which on that many first tokens are tried
_MARK = "\x02"  # before a text whose tokens are wanted as they are within a longer one


class Constraints:
    """Compiles constraints for one model.

    Args:
        tokenizer: the model's, of any kind.
        vocab_size: V, of the model: ids beyond the tokenizer's are never allowed.
        eos_token_ids: ids that end a text; default: the tokenizer's. They are allowed only where the
            constraint may end.
        whitespace: of JSON, where a call does not say; see `json_schema`.

    Raises:
        ConfigError: llguidance is not installed.
        ConstraintError: the model has no end-of-text id.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int] | None = None,
        *,
        whitespace: Whitespace = "flexible",
    ) -> None:
        self.whitespace: Whitespace = whitespace
        ends = tokenizer.eos_token_ids if eos_token_ids is None else eos_token_ids
        self.eos_token_ids = tuple(i for i in dict.fromkeys(ends) if 0 <= i < vocab_size)
        if not self.eos_token_ids:
            msg = (
                "structured output was asked, but this model names no end-of-text token, by which a "
                "complete answer ends; models with eos_token_id (generation_config.json, "
                "tokenizer.ggml.eos_token_id) can serve it; take one, or ask without a format"
            )
            raise ConstraintError(msg)
        try:
            from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper
        except ImportError as error:
            msg = (
                "structured output needs the package llguidance, which is not installed; it is part of the "
                'extra "server": pip install "paceline[server]"'
            )
            raise ConfigError(msg) from error
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Words(tokenizer, vocab_size, self.eos_token_ids[0])),
            n_vocab=vocab_size,
            eos_token=list(self.eos_token_ids),
        )
        self._limits = LLParserLimits(
            initial_lexer_fuel=_START_FUEL,
            step_lexer_fuel=_STEP_FUEL,
            step_max_items=_STEP_ITEMS,
            max_lexer_states=_LEXER_STATES,
            max_grammar_size=_GRAMMAR_SIZE,
            verbose_errors=False,
        )

    def json_schema(self, schema: object, *, whitespace: Whitespace | None = None) -> Constraint:
        """JSON that a schema (draft 2020-12) accepts.

        Args:
            schema: an object of JSON values, its JSON text, or True.
            whitespace: "flexible": up to 64 whitespace characters where JSON allows any; "spaced": one
                space after "," and ":", none elsewhere, as Python's `json.dumps` writes; "compact": none;
                default: these constraints' own.

        Raises:
            ConstraintError: the schema is no JSON, malformed, nothing fits it, it is too large, or it uses a
                keyword that is not served; the message names it.
        """
        whitespace = self.whitespace if whitespace is None else whitespace
        if whitespace not in LAYOUTS:
            msg = f"whitespace {whitespace!r}: {', '.join(get_args(Whitespace))} are possible; use one"
            raise ConstraintError(msg)
        from llguidance import LLMatcher

        read = read_schema(schema)
        try:
            check_numbers(read)
            for pattern in patterns(read):
                check_regex("JSON schema's pattern", pattern)
        except RecursionError as error:
            msg = "the JSON schema is nested too deeply; some 200 schemas in one another are possible; use fewer"
            raise ConstraintError(msg) from error
        text = json.dumps(read)  # not the object: whole numbers may have more than 64 bits
        try:
            source = LLMatcher.grammar_from_json_schema(text, overrides=LAYOUTS[whitespace])
        except ValueError as error:
            told = refusal("JSON schema", str(error), read)
            raise told from error
        return self._compiled("JSON schema", source, read)

    def json_object(self, *, whitespace: Whitespace | None = None) -> Constraint:
        """Any JSON object."""
        return self.json_schema({"type": "object"}, whitespace=whitespace)

    def regex(self, pattern: str) -> Constraint:
        """Text that a regular expression matches as a whole.

        Syntax of Rust's `regex` crate: no look-around, no back-references, no possessive quantifiers, no
        flag x; anchors are implied.

        Raises:
            ConstraintError: malformed, not served or too large.
        """
        from llguidance import LLMatcher

        check_size("regex", pattern)
        check_regex("regex", pattern)
        return self._compiled("regex", LLMatcher.grammar_from_regex(pattern))

    def choice(self, choices: Sequence[str]) -> Constraint:
        """One of several texts.

        Raises:
            ConstraintError: there are none, too many, or something is no text.
        """
        from llguidance import LLMatcher

        if isinstance(choices, str) or not choices or not all(isinstance(c, str) for c in choices):
            msg = (
                f"choice is {quoted(choices)}; a list of at least one string is possible; pass one"
            )
            raise ConstraintError(msg)
        if len(choices) > MAX_CHOICES:
            msg = (
                f"choice has {len(choices)} entries; at most {MAX_CHOICES} are possible; pass fewer"
            )
            raise ConstraintError(msg)
        words = " | ".join(json.dumps(c, ensure_ascii=False) for c in choices)
        check_size("choice", words)
        return self._compiled("choice", LLMatcher.grammar_from_lark(f"start: {words}"))

    def lark(self, grammar: str) -> Constraint:
        """Text of a context-free grammar, in Lark's syntax as llguidance reads it, or in GBNF.

        Raises:
            ConstraintError: malformed (the message says where), not served or too large.
        """
        from llguidance import LLMatcher

        check_size("grammar", grammar)
        if re.search(r"^\s*[\w-]+\s*::=", grammar, re.MULTILINE):
            grammar = lark_of_gbnf(grammar)
        check_rules("grammar", "rules", sum(":" in line for line in grammar.splitlines()))
        for pattern in regexes(grammar):
            check_regex("grammar's regex", pattern)
        return self._compiled("grammar", LLMatcher.grammar_from_lark(grammar))

    def _compiled(
        self, kind: str, source: str, schema: Mapping[str, object] | None = None
    ) -> Constraint:
        from llguidance import LLMatcher

        def make() -> LLMatcher:
            return LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)

        try:
            matcher = make()
            if not matcher.is_error():
                matcher.compute_bitmask()  # whoever asks for too much is told now
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            raise refusal(kind, f"llguidance broke down: {error}", schema) from error
        if matcher.is_error():
            raise refusal(kind, matcher.get_error(), schema)
        matchers = Matchers(make, matcher)
        compiled = _Compiled(matchers, self.eos_token_ids, self._tokenizer.vocab_size)
        if len(source) > _LONG:
            self._take_first(kind, compiled)
        return compiled

    def _take_first(self, kind: str, constraint: Constraint) -> None:
        """Refuse what cannot be followed: its mask allows a token which its limits then refuse."""
        grammar = constraint.start()
        bits = np.unpackbits(np.frombuffer(bytearray(grammar.mask()), np.uint8), bitorder="little")
        ids = [i for i in bits.nonzero()[0].tolist() if i not in self.eos_token_ids]
        for token_id in ids[:_TRIED]:
            if not grammar.advance(token_id):
                msg = (
                    f"the {kind} has so many alternatives in one place that it cannot be followed (some 400 "
                    "optional properties of an object are possible); require properties, or name fewer"
                )
                raise ConstraintError(msg)
            grammar.rollback(1)


class _Compiled:
    """A `Constraint`."""

    def __init__(self, matchers: Matchers, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._matchers = matchers
        self._eos = frozenset(eos_token_ids)
        self._vocab_size = vocab_size

    def start(self, *, ignore_eos: bool = False) -> Grammar:
        """See `Constraint`."""
        return MatcherGrammar(self._matchers, self._eos, self._vocab_size, ignore_eos=ignore_eos)


class _Words:
    """The model's tokens as llguidance asks for them: their bytes, and how a text is cut into them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        ends = set(tokenizer.eos_token_ids) | {eos_token_id}
        self.special_token_ids = sorted(i for i in tokenizer.special_ids | ends if i < vocab_size)
        self._tokenizer = tokenizer
        self._num_marks = 0  # tokens before a text that the tokenizer would put a space in front of
        first = tokenizer.encode("a", add_special_tokens=False)
        if first and tokenizer.token_bytes(first[0]).startswith(b" "):
            self._num_marks = len(tokenizer.encode(_MARK, add_special_tokens=False))

    def __call__(self, text: bytes | str) -> list[int]:
        """Token ids of a text; of bytes that are no UTF-8, those before them."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", "ignore")
        if self._num_marks:
            ids = self._tokenizer.encode(_MARK + text, add_special_tokens=False)
            return ids[self._num_marks :]
        return self._tokenizer.encode(text, add_special_tokens=False)
