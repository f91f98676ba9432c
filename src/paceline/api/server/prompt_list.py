"""The four shapes of a completion's `prompt`, made into lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.api.server.errors import api_error, bad
from paceline.api.server.sampling import check_ids
from paceline.core.errors import RequestError, quoted

if TYPE_CHECKING:
    from paceline.api.server.context import Context

MAX_PROMPTS = 4096  # of one request; each is tokenized before the queue can refuse it
_POSSIBLE = "text, a list of texts, a list of token ids, or a list of such lists is possible"


def prompts_of(given: object, context: Context, *, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of every prompt of a request; at least one, none of them empty.

    Args:
        given: what the request says.
        context: what is served.
        add_special_tokens: to texts, such as the model's beginning-of-text token.

    Raises:
        ApiError: 400; it has another shape, or a prompt has no tokens.
    """
    match given:
        case str():
            items: Sequence[object] = [given]
        case [int(), *_]:
            items = [given]
        case [_, *_]:
            items = given
        case []:
            msg = f"prompt is an empty list; {_POSSIBLE}; give at least one prompt"
            raise bad(msg, "prompt")
        case _:
            msg = f"prompt is {quoted(given)}; {_POSSIBLE}; change it"
            raise bad(msg, "prompt")
    if len(items) > MAX_PROMPTS:
        msg = f"prompt is a list of {len(items)}; at most {MAX_PROMPTS:,} are possible; send fewer"
        raise bad(msg, "prompt")
    place = "prompt" if len(items) == 1 else "prompt.{0}"
    return [
        _ids(item, context, place.format(i), add_special_tokens=add_special_tokens)
        for i, item in enumerate(items)
    ]


def _ids(item: object, context: Context, place: str, *, add_special_tokens: bool) -> list[int]:
    match item:
        case str():
            try:
                ids = context.tokenizer.encode(item, add_special_tokens=add_special_tokens)
            except RequestError as error:
                raise api_error(error, param=place) from error
        case list() if all(type(i) is int for i in item):  # neither true nor false
            ids = item
            check_ids(place, ids, context.vocab_size)
        case _:
            wrong = item
            if isinstance(item, list):
                wrong = next(i for i in item if type(i) is not int)
            msg = f"{place}: {quoted(wrong)} has no place here; {_POSSIBLE}; change it"
            raise bad(msg, place)
    if not ids:
        msg = (
            f"{place} has no tokens; at least one is needed to start from; give it some text, or "
            "leave it out of the list"
        )
        raise bad(msg, place)
    return ids
