"""The shapes in which prompts, conversations and parameters may be given, made into lists of one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from paceline.api.chat_template import Message
from paceline.core.errors import RequestError
from paceline.core.request import SamplingParams

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None


def as_prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several -> several. A sequence of whole numbers is one prompt of token ids.

    Raises:
        RequestError: an item is neither text nor a sequence.
    """
    if isinstance(given, str):
        return [given]
    items = list(given)
    if items and all(isinstance(item, int) for item in items):
        return [cast("list[int]", items)]
    bad = [
        i
        for i, item in enumerate(items)
        if not isinstance(item, str | Sequence) or isinstance(item, bytes)
    ]
    if bad:
        msg = (
            f"prompt {bad[0]} of {len(items)} is {items[bad[0]]!r}; a prompt is text or a list of "
            "token ids, and prompts are a list of these"
        )
        raise RequestError(msg)
    return cast("list[Prompt]", items)


def as_conversations(
    given: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """One conversation or several -> several. A sequence of messages is one conversation."""
    if given and all(isinstance(item, Mapping) for item in given):
        return [cast("Sequence[Message]", given)]
    return list(cast("Sequence[Sequence[Message]]", given))


def one_each(params: Params, prompts: Sequence[object]) -> Sequence[SamplingParams]:
    """Parameters for each prompt; one for all may be given, or none.

    Raises:
        RequestError: as many as neither one nor the prompts.
    """
    if params is None:
        return [SamplingParams()] * len(prompts)
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if len(params) != len(prompts):
        msg = (
            f"{len(prompts)} prompts came with {len(params)} sampling parameters; pass one for "
            "all, or one per prompt"
        )
        raise RequestError(msg)
    return params
