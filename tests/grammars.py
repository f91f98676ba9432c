"""Constraints for the tiny checkpoints' 97 tokens, with an oracle that knows nothing of grammars; no tests here.

Each is a regular expression that Python's `re` reads as well, so whether a text obeys is its answer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from paceline.api.grammar import Constraints
from paceline.api.tokenizer import Tokenizer
from paceline.api.tokenizer_files import TokenizerParts
from paceline.core.request import Constraint, Request, SamplingParams
from tests import tiny
from tests.engine.harness import request

VOCABULARY = 97
PATTERNS = {
    "form": r"name: [a-z]{2,6}; likes: (tea|coffee|the thing)\.",
    "list": r"(the|of|on)( (the|of|on|and|ing|er)){2,14}\.",
    "numbers": r"[0-9]{3}-[0-9]{4}(, [0-9]{3}-[0-9]{4}){0,2}",
    "free": r"[A-Za-z ,.]{4,24}[!?]",
}


@functools.cache
def tokenizer() -> Tokenizer:
    """The tiny checkpoints' own."""
    named = dict(zip(("unk_token", "bos_token", "eos_token"), tiny.SPECIALS, strict=True))
    return Tokenizer(
        TokenizerParts(
            backend=tiny.tiny_tokenizer(),
            named_tokens=named,
            bos_token_id=tiny.BOS,
            eos_token_ids=(tiny.EOS,),
        )
    )


@functools.cache
def constraints() -> Constraints:
    """Of the tiny checkpoints."""
    return Constraints(tokenizer(), VOCABULARY)


@functools.cache
def constraint(name: str) -> Constraint:
    """One of `PATTERNS`, compiled."""
    return constraints().regex(PATTERNS[name])


def constrained(
    key: str, prompt: Sequence[int], params: SamplingParams, pattern: str | None, **extra: object
) -> Request:
    """A request that obeys one of `PATTERNS`; None: it is free."""
    if pattern is not None:
        extra["grammar"] = constraint(pattern).start(ignore_eos=params.ignore_eos)
        extra["stop_ids"] = frozenset({tiny.EOS, *params.stop_token_ids})
    made = request(key, prompt, params)
    return Request(
        **{
            **{name: getattr(made, name) for name in Request.__dataclass_fields__},
            **extra,
        }
    )


def obeys(name: str, tokens: Sequence[int]) -> bool:
    """Whether a finished answer is one of the pattern's texts."""
    text = tokenizer().decode([t for t in tokens if t != tiny.EOS])
    return re.fullmatch(PATTERNS[name], text) is not None
