"""Where an answer's tokens came from, for the page: each with its text, and the trees they were found in.

Not for: the text as a whole, which `choices[]` has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.api.server.errors import bad

if TYPE_CHECKING:
    from paceline.api.results import Chunk
    from paceline.api.server.context import Context
    from paceline.api.server.protocol_sampling import SamplingFields
    from paceline.core.request import VerifiedTree


def page_fields(chunk: Chunk, body: SamplingFields, context: Context) -> dict[str, Any]:
    """`paceline` of a choice in a stream, as far as the request asks for it; else empty."""
    told: dict[str, Any] = {}
    if body.wants_sources:
        told |= sources_of(chunk.token_ids, chunk.sources, context)
    if body.wants_trees:
        told["trees"] = [tree_of(tree, context) for tree in chunk.trees]
    return {"paceline": told} if body.wants_sources or body.wants_trees else {}


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


def tree_of(tree: VerifiedTree, context: Context) -> dict[str, Any]:
    """One step's tree: lists in step over its nodes, then the accepted path and what was emitted.

    `scores` are logarithms, with four places; null where a node was given no chance.
    """
    text = context.tokenizer.token_text
    return {
        "start": tree.start,
        "token_ids": list(tree.token_ids),
        "tokens": [text(token_id) for token_id in tree.token_ids],
        "parents": list(tree.parents),
        "sources": [context.source(number) for number in tree.sources],
        "scores": [round(s, 4) if math.isfinite(s) else None for s in tree.scores],
        "path": list(tree.path),
        "emitted_ids": list(tree.emitted),
        "emitted": [text(token_id) for token_id in tree.emitted],
    }


def check_trees(body: SamplingFields) -> bool:
    """Whether trees are asked for.

    Raises:
        ApiError: 400; trees are told while an answer is made, and this one comes as a whole.
    """
    if body.wants_trees and not body.streams:
        msg = (
            "paceline.tree: trees come with the chunks of a stream, and none is asked for; set "
            "`stream: true`, or leave it out"
        )
        raise bad(msg, "paceline.tree")
    return body.wants_trees
