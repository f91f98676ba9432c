"""The shapes in which prompts, conversations and parameters may be given, made into lists of one shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from paceline.api.chat_template import Message
from paceline.core.errors import RequestError, TemplateError
from paceline.core.request import SamplingParams

Prompt = str | Sequence[int]
_RESERVED = frozenset({"messages", "add_generation_prompt"})
Params = SamplingParams | Sequence[SamplingParams] | None


def as_prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several -> several. A sequence of whole numbers is one prompt of token ids.

    Raises:
        RequestError: an item is neither text nor a sequence.
    """
    if isinstance(given, str):
        return [given]
    if isinstance(given, bytes | bytearray | Mapping) or not isinstance(given, Iterable):
        msg = (
            f"prompts are a {type(given).__name__}; text, a list of token ids, or a list of these "
            "is possible; decode bytes, and pass one prompt as it is"
        )
        raise RequestError(msg)
    items: list[object] = list(given)
    if items and all(isinstance(item, int) for item in items):
        return [cast("list[int]", items)]
    bad = [i for i, item in enumerate(items) if not _is_prompt(item)]
    if bad:
        msg = (
            f"prompt {bad[0]} of {len(items)} is {items[bad[0]]!r}; a prompt is text or a list of "
            "token ids, and prompts are a list of these"
        )
        raise RequestError(msg)
    return cast("list[Prompt]", items)


def _is_prompt(item: object) -> bool:
    """Text, or a sequence of whole numbers; numbers in a list of a library's own are fine."""
    if isinstance(item, str):
        return True
    if isinstance(item, bytes | bytearray) or not isinstance(item, Sequence):
        return False
    return all(isinstance(token, Integral) and not isinstance(token, bool) for token in item)


def as_conversations(
    given: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """One conversation or several -> several. A sequence of messages is one conversation.

    Raises:
        TemplateError: it is neither.
    """
    outer: object = given
    if isinstance(outer, str | bytes | Mapping) or not isinstance(outer, Sequence):
        found = type(given).__name__
        msg = (
            f"cannot render a chat from a {found}; a list of messages is needed; pass "
            '[{"role": "user", "content": "..."}]'
        )
        raise TemplateError(msg)
    if given and all(isinstance(item, Mapping) for item in given):
        return [cast("Sequence[Message]", given)]
    return list(cast("Sequence[Sequence[Message]]", given))


def one_each(params: Params, prompts: Sequence[object]) -> Sequence[SamplingParams]:
    """Parameters for each prompt; one for all may be given, or none.

    Raises:
        RequestError: as many as neither one nor the prompts, or they are something else.
    """
    if params is None:
        return [SamplingParams()] * len(prompts)
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    given: object = params
    if not isinstance(given, Sequence) or not all(isinstance(p, SamplingParams) for p in given):
        msg = (
            f"the sampling parameters are {params!r}; one SamplingParams, or a list with one per "
            "prompt, is possible; write SamplingParams(temperature=0, ...)"
        )
        raise RequestError(msg)
    if len(params) != len(prompts):
        msg = (
            f"{len(prompts)} prompts came with {len(params)} sampling parameters; pass one for "
            "all, or one per prompt"
        )
        raise RequestError(msg)
    return params


def template_variables(kwargs: Mapping[str, object] | None) -> dict[str, Any]:
    """Variables for a chat template, as keyword arguments.

    Raises:
        TemplateError: it is no mapping from names, or takes a name that the call itself sets.
    """
    given: object = kwargs
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        msg = (
            f"chat_template_kwargs is {given!r}; an object with names as keys is possible; pass "
            '{"enable_thinking": False}, for example'
        )
        raise TemplateError(msg)
    taken = sorted(_RESERVED & given.keys())
    if taken:
        msg = (
            f"chat_template_kwargs sets {', '.join(taken)}; all other names are possible; give "
            "these by themselves, beside it"
        )
        raise TemplateError(msg)
    return dict(given)
