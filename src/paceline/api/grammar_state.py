"""MatcherGrammar: one answer's place in its grammar, a `core.request.Grammar` over llguidance's matcher.

The matcher knows bytes and tokens; the end of a text is this class's own business. An end-of-text id is
allowed where the matcher may end, and after one nothing but another may follow. (The matcher would take
such an id only sometimes: not once it has stopped by itself.)

Drafts lead it along paths that the answer never takes, so the state after a `rollback` must be that of
the tokens that are left, whatever was tried. A matcher that fails at one of its limits stays failed, and
copies of a matcher, its company, fill one table of lexer states together; so after a failure matchers that
know nothing yet take the same tokens again, and neither what was merely tried nor an earlier answer costs
this one anything.

Where the text's next bytes are known the matcher allows one token only, its tokenizer's; so a known run of
tokens answers for all its places, and long ones are computed once, not once a token.

Not here: what is compiled (grammar.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from paceline.core.errors import PacelineError, RequestError

if TYPE_CHECKING:
    import llguidance


T = TypeVar("T")
_MOST_FORCED = 256  # that anybody is told of at a time


class GrammarFailedError(RequestError):
    """A grammar that was compiled cannot be followed here, mostly because it became too complex."""


class GrammarBrokenError(PacelineError):
    """The library failed at a grammar where it should not have."""


class Matchers:
    """Matchers of one grammar in their first state, for any number of answers and threads.

    Args:
        make: compiles one.
        first: what it made before.
    """

    def __init__(
        self, make: Callable[[], llguidance.LLMatcher], first: llguidance.LLMatcher
    ) -> None:
        self._make = make
        self._first = first  # copied, never moved
        self.age = 0  # how many were before it
        self._lock = threading.Lock()

    def copied(self) -> tuple[llguidance.LLMatcher, int]:
        """A matcher, and how many were full before those that it shares its lexer with."""
        with self._lock:
            return self._first.deep_copy(), self.age

    def renewed(self, age: int) -> tuple[llguidance.LLMatcher, int]:
        """As `copied`, after one of this age has failed: not of its company."""
        with self._lock:
            if age == self.age:
                self._first, self.age = self._make(), age + 1
            return self._first.deep_copy(), self.age


class MatcherGrammar:
    """See the module.

    Args:
        matchers: where one comes from.
        eos_token_ids: ids that end a text, within the matcher's vocabulary.
        vocab_size: the matcher's.
        ignore_eos: end only where nothing else is allowed.
    """

    def __init__(
        self,
        matchers: Matchers,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        *,
        ignore_eos: bool = False,
    ) -> None:
        self._matchers = matchers
        self._eos = eos_token_ids
        self._ignore_eos = ignore_eos
        self._matcher, self._age = matchers.copied()
        self._tokens: list[int] = []  # taken so far, ends included
        self._num_bytes = 4 * -(-vocab_size // 32)
        self._only_ends = _bits(eos_token_ids, self._num_bytes)
        # The newest forced run, maybe empty, and after how many tokens it begins; -1: not known. The
        # tokens taken since are its first.
        self._run: Sequence[int] = ()
        self._run_start = -1

    def mask(self) -> bytes:
        """See `Grammar`.

        Raises:
            GrammarFailedError: the work for it exceeds the limits that it was compiled with.
            GrammarBrokenError: the library broke down.
        """
        if self._ended:
            return self._only_ends
        forced = self.forced()
        if forced:
            return _bits(frozenset(forced[:1]), self._num_bytes)
        # The matcher appends a word where the vocabulary fills the last one.
        mask = self._asked(lambda matcher: matcher.compute_bitmask())[: self._num_bytes]
        if self._matcher.is_error():
            error = self._matcher.get_error().strip()
            self._renew()
            raise GrammarFailedError(error)
        return self._without_ends(mask) if self._ignore_eos else mask

    def advance(self, token_id: int) -> bool:
        """See `Grammar`."""
        if token_id in self._eos:
            taken = self._may_end(token_id)
        elif self._ended:
            taken = False
        else:
            taken = self._asked(lambda matcher: matcher.try_consume_tokens([token_id])) == 1
            if self._matcher.is_error():
                self._renew()
        if taken:
            if self._known_run()[:1] != [token_id]:
                self._run_start = -1
            self._tokens.append(token_id)
        return taken

    def rollback(self, num_tokens: int) -> None:
        """See `Grammar`."""
        if not num_tokens:
            return
        assert num_tokens <= len(self._tokens), "more tokens are taken back than were taken"
        dropped = self._tokens[-num_tokens:]
        del self._tokens[-num_tokens:]
        if len(self._tokens) < self._run_start:
            self._run_start = -1
        count = sum(token not in self._eos for token in dropped)
        if count and not self._matcher.rollback(count):
            self._renew()

    def forced(self) -> Sequence[int]:
        """See `Grammar`."""
        if self._ended:
            return ()
        if not 0 <= self._run_start <= len(self._tokens) < self._run_start + max(1, len(self._run)):
            self._run = self._asked(lambda matcher: matcher.compute_ff_tokens())
            self._run_start = len(self._tokens)
        return self._known_run()

    def _known_run(self) -> list[int]:
        """What of the run is still to come, as far as anybody asks; empty where none is known."""
        if self._run_start < 0:
            return []
        done = len(self._tokens) - self._run_start
        return list(self._run[done : done + _MOST_FORCED])

    def _may_end(self, token_id: int) -> bool:
        try:
            return bool(self.mask()[token_id >> 3] >> (token_id & 7) & 1)
        except PacelineError:  # allows nothing here
            return False

    @property
    def _ended(self) -> bool:
        return bool(self._tokens) and self._tokens[-1] in self._eos

    def _renew(self) -> None:
        """Another matcher in the state of the tokens taken so far."""
        self._matcher, self._age = self._matchers.renewed(self._age)
        self._matcher.consume_tokens([t for t in self._tokens if t not in self._eos])

    def _asked(self, question: Callable[[llguidance.LLMatcher], T]) -> T:
        """The matcher's answer.

        One that fails may have been full, and so may be a newer one, which others use; the second that is
        asked in its place was made for this. Only the first of a company is told that it is full; the
        others would refuse what they should allow, so they leave as soon as one has.
        """
        try:
            if self._age != self._matchers.age:
                self._renew()
            answer = question(self._matcher)
            for _ in range(2):
                if self._matcher.is_error():
                    self._renew()
                    answer = question(self._matcher)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            msg = f"llguidance broke down: {error}"
            raise GrammarBrokenError(msg) from error
        return answer

    def _without_ends(self, mask: bytes) -> bytes:
        others = int.from_bytes(mask, "little") & ~int.from_bytes(self._only_ends, "little")
        return others.to_bytes(len(mask), "little") if others else mask


def _bits(token_ids: frozenset[int], num_bytes: int) -> bytes:
    """A mask with only these bits."""
    return sum(1 << i for i in token_ids).to_bytes(num_bytes, "little")
