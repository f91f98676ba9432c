"""Answers of which only the prompt is wanted: `max_tokens` 0 with `echo`, which scores a text.

The engine always makes a token; here it is taken out again, as if there had been none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.api.results import Chunk, Result

_WHOLE = {"stop", "length"}


def without_answer(result: Result) -> Result:
    """The same with no token; why it ended early, if it did, is kept."""
    whole = result.finish_reason in _WHOLE
    return replace(
        result,
        text="",
        token_ids=(),
        sources=(),
        logprobs=None if result.logprobs is None else (),
        finish_reason="length" if whole else result.finish_reason,
        stop_reason=None,
        stats=replace(result.stats, num_output_tokens=0),
    )


def chunk_without_answer(chunk: Chunk) -> Chunk:
    """The same for what a stream is made of."""
    result = None if chunk.result is None else without_answer(chunk.result)
    return replace(
        chunk,
        text="",
        token_ids=(),
        sources=(),
        logprobs=None if chunk.logprobs is None else (),
        finish_reason=None if result is None else result.finish_reason,
        result=result,
        trees=(),
    )
