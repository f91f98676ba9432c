"""A service whose model says what a test wants, in the bytes of a text; no tests here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.api.llm import LLM
from paceline.api.server.context import Context, context_of
from paceline.api.server.tools import ModelPlanner, planner_of
from paceline.api.tokenizer import Tokenizer
from paceline.core.request import Request
from tests.byte_tokenizer import byte_tokenizer
from tests.fake_engine import EOS, FakeEngine

Says = str | Callable[[Request], str]


def thinker() -> Tokenizer:
    """A tokenizer whose `<think>` and `</think>` are tokens, of no special kind."""
    return byte_tokenizer(plain=["<think>", "</think>"])


@contextmanager
def scripted(
    says: Says, tokenizer: Tokenizer | None = None, *, width: int = 5, **options: Any
) -> Iterator[tuple[LLM, Context, ModelPlanner]]:
    """An LLM that answers with a text, its context and its planner.

    Args:
        says: the answer, or a function of the request that gives it.
        tokenizer: default: `thinker()`.
        width: bytes a step.
        options: of the context.
    """
    found = tokenizer or thinker()

    def script(request: Request, _: int) -> Sequence[int]:
        text = says if isinstance(says, str) else says(request)
        return [*found.encode(text, add_special_tokens=False), EOS]

    llm = LLM.from_engine(FakeEngine(script, width=width, max_len=100_000), found)
    try:
        context = context_of(llm, model_names=["tiny"], created=7, version="1.2", **options)
        yield llm, context, planner_of(found)
    finally:
        llm.close()
