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


def scripted_llm(
    says: Says,
    tokenizer: Tokenizer,
    *,
    width: int = 5,
    on_step: Callable[[int], None] = lambda _: None,
) -> LLM:
    """An LLM that answers with a text.

    Args:
        says: the answer, or a function of the request that gives it.
        tokenizer: the model's.
        width: most tokens a step, up to 8.
        on_step: see `FakeEngine`.
    """

    def script(request: Request, _: int) -> Sequence[int]:
        text = says if isinstance(says, str) else says(request)
        return [*tokenizer.encode(text, add_special_tokens=False), EOS]

    engine = FakeEngine(script, width=width, max_len=100_000, on_step=on_step)
    return LLM.from_engine(engine, tokenizer)


@contextmanager
def scripted(
    says: Says, tokenizer: Tokenizer | None = None, *, width: int = 5, **options: Any
) -> Iterator[tuple[LLM, Context, ModelPlanner]]:
    """Such an LLM with its context and its planner.

    Args:
        says: see `scripted_llm`.
        tokenizer: default: `thinker()`.
        width: see `scripted_llm`.
        options: of the context.
    """
    found = tokenizer or thinker()
    llm = scripted_llm(says, found, width=width)
    try:
        context = context_of(llm, model_names=["tiny"], created=7, version="1.2", **options)
        yield llm, context, planner_of(found)
    finally:
        llm.close()
