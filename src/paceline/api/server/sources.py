"""Where an answer's tokens came from, for the page: each with its text, in place of the text as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.api.server.context import Context


def sources_of(
    token_ids: Sequence[int], sources: Sequence[int], context: Context
) -> dict[str, Any]:
    """Lists in step: `sources` (a drafter's name, or "target"), `tokens` (text), `token_ids`.

    A token that is a part of a character has U+FFFD for text; `choices[].delta` has it whole.

    Args:
        token_ids: what was emitted.
        sources: the number of each token's drafter; 0: the model itself.
        context: knows the names.
    """
    return {
        "sources": [context.source(number) for number in sources],
        "tokens": [context.tokenizer.token_text(token_id) for token_id in token_ids],
        "token_ids": list(token_ids),
    }
