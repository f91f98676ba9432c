"""A service whose model says what a test wants, in the bytes of a text; no tests here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from paceline.api.llm import LLM
from paceline.api.server.context import Compiler, Context, context_of
from paceline.api.server.settings import ServerSettings
from paceline.api.server.tools import ModelPlanner, planner_of
from paceline.api.tokenizer import Tokenizer
from paceline.core.request import Request
from tests.byte_tokenizer import byte_tokenizer
from tests.fake_engine import EOS, FakeEngine

MAX_LEN = 100_000
Says = str | Callable[[Request], str]


def thinker() -> Tokenizer:
    """A tokenizer whose `<think>` and `</think>` are tokens, of no special kind."""
    return byte_tokenizer(plain=["<think>", "</think>"])


def script_of(says: Says, tokenizer: Tokenizer) -> Callable[[Request, int], Sequence[int]]:
    """What a `FakeEngine` is to answer.

    Args:
        says: the answer, or a function of the request that gives it.
        tokenizer: the model's.
    """

    def script(request: Request, _: int) -> Sequence[int]:
        text = says if isinstance(says, str) else says(request)
        return [*tokenizer.encode(text, add_special_tokens=False), EOS]

    return script


@contextmanager
def scripted(
    says: Says,
    tokenizer: Tokenizer | None = None,
    *,
    width: int = 5,
    compiler: Compiler | None = None,
) -> Iterator[tuple[LLM, Context, ModelPlanner]]:
    """An LLM that answers with a text, its context and its planner.

    Args:
        says: see `script_of`.
        tokenizer: default: `thinker()`.
        width: most tokens a step, up to 8.
        compiler: of constraints.
    """
    found = tokenizer or thinker()
    engine = FakeEngine(script_of(says, found), width=width, max_len=MAX_LEN)
    llm = LLM.from_engine(engine, found)
    try:
        settings = ServerSettings(served_model_name=("tiny",))
        context = context_of(llm, settings, created=7, version="1.2", compiler=compiler)
        yield llm, context, planner_of(found)
    finally:
        llm.close()
