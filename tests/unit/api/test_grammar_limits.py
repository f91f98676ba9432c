"""Matchers that reach their limits: what was tried, or answered before, costs an answer nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.api.grammar import ConstraintError, Constraints
from paceline.api.grammar_state import (
    GrammarBrokenError,
    GrammarFailedError,
    MatcherGrammar,
    Matchers,
)
from paceline.api.tokenizer import Tokenizer
from paceline.core.request import Constraint
from tests import tiny_tokenizers

SIZE = 416


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizers.byte_level()


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """One id for each byte."""
    return [
        next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))
        for byte in text.encode()
    ]


class Failing:
    """A matcher that fails on purpose, as one does that reaches its limits."""

    def __init__(self, matcher: Any, bad: int, *, for_good: bool) -> None:
        self.matcher, self.bad, self.for_good = matcher, bad, for_good
        self.failed = False
        self.tokens: list[int] = []

    def deep_copy(self) -> Any:
        return Failing(self.matcher.deep_copy(), self.bad, for_good=self.for_good)

    def is_error(self) -> bool:
        return self.failed

    def get_error(self) -> str:
        return "ParserTooComplex"

    def compute_bitmask(self) -> bytes:
        self.failed |= self.bad in self.tokens
        return bytes(self.matcher.compute_bitmask())

    def try_consume_tokens(self, tokens: list[int]) -> int:
        count = 0 if self.failed else self.matcher.try_consume_tokens(tokens)
        self.tokens += tokens[:count]
        return int(count)

    def consume_tokens(self, tokens: list[int]) -> bool:
        self.tokens += tokens
        return bool(self.matcher.consume_tokens(tokens))

    def rollback(self, count: int) -> bool:
        del self.tokens[len(self.tokens) - count :]
        return not self.failed and bool(self.matcher.rollback(count))

    def compute_ff_tokens(self) -> list[int]:
        return []


def started(built: Constraint, bad: int, *, for_good: bool) -> MatcherGrammar:
    """A state whose matcher fails after the token `bad`; `for_good`: fresh ones do so as well."""
    make = built._matchers._make

    def again() -> Any:
        return Failing(make(), bad, for_good=True) if for_good else make()

    first = Failing(make(), bad, for_good=True)
    return MatcherGrammar(Matchers(again, first), built._eos, built._vocab_size)


def test_a_matcher_that_fails_off_the_path_costs_nothing(
    tokenizer: Tokenizer,
) -> None:
    """A limit that was reached where a draft led is forgotten with the draft."""
    a, b = ids_of(tokenizer, "ab")
    built = Constraints(tokenizer, SIZE).regex("a[ab]+")
    for for_good in (False, True):
        state, fresh = started(built, b, for_good=for_good), built.start()
        assert state.advance(a)
        assert fresh.advance(a)
        assert state.advance(b)
        if for_good:
            with pytest.raises(GrammarFailedError, match="ParserTooComplex"):
                state.mask()
        else:
            state.mask()
        state.rollback(1)
        assert state.mask() == fresh.mask()
        assert state.advance(a)


class PanicError(BaseException):
    """As a library in Rust ends where it is broken: no Exception."""


def test_a_panic_is_one_answers_failure(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """Whatever breaks down in there must not end the engine's thread."""

    class Panic:
        grammar_from_lark = str

        def __init__(self, *_: object, **__: object) -> None:
            raise PanicError

    def panic(self: Failing) -> bytes:
        raise PanicError

    state = started(Constraints(tokenizer, SIZE).regex("a[ab]+"), 0, for_good=True)
    monkeypatch.setattr(Failing, "compute_bitmask", panic)
    with pytest.raises(GrammarBrokenError, match="broke down"):
        state.mask()
    monkeypatch.setattr("llguidance.LLMatcher", Panic)
    with pytest.raises(ConstraintError, match="broke down"):
        Constraints(tokenizer, SIZE).lark('start: "a"')


def test_many_answers_of_one_constraint(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """Answers fill one table of lexer states together: it is renewed before the next one fails for it."""
    monkeypatch.setattr("paceline.api.grammar._LEXER_STATES", 250)
    built = Constraints(tokenizer, SIZE).regex("[ab]*a[ab]{18}c")
    draw, ids = random.Random(5), ids_of(tokenizer, "ab")
    for _ in range(60):
        state, fresh = built.start(), built.start()
        for _ in range(60):
            mask = state.mask()
            token = draw.choice(ids)
            assert mask[token >> 3] >> (token & 7) & 1
            assert state.advance(token)
            assert fresh.advance(token)
            assert draw.random() < 0.9 or fresh.mask() == state.mask()
    assert built._matchers.age > 2, "it never was full: no test at all"
