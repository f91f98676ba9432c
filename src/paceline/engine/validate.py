"""Checks a request against the model and the cache before it is queued."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral

from paceline.core.errors import RequestError
from paceline.core.request import Request
from paceline.core.sampling_rules import MAX_TOP_LOGPROBS


def check_request(request: Request, vocab_size: int, max_len: int, drafters: Sequence[str]) -> None:
    """Refuse a request that cannot be served.

    Args:
        request: the request.
        vocab_size: ids run from 0 to `vocab_size` - 1.
        max_len: context window in tokens.
        drafters: names that a request may give: the drafter's own, then those of its parts.

    Raises:
        RequestError: with what was asked, what is possible and what to do.
    """
    prompt, params = request.prompt_ids, request.params
    if len(prompt) == 0:
        msg = "the prompt is empty; give at least one token (a chat template or BOS adds some)"
        raise RequestError(msg)
    if len(prompt) >= max_len:
        msg = (
            f"the prompt has {len(prompt)} tokens, but the context window of {max_len} must hold "
            f"it and at least one new token; shorten it to {max_len - 1}, or raise max_len"
        )
        raise RequestError(msg)
    if request.prompt_logprobs is not None and not 0 <= request.prompt_logprobs <= MAX_TOP_LOGPROBS:
        msg = (
            f"prompt_logprobs {request.prompt_logprobs!r} must be None or 0 ... {MAX_TOP_LOGPROBS}; "
            "ask for fewer alternatives"
        )
        raise RequestError(msg)
    _check_ids("prompt token ids", prompt, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_ids("banned_token_ids", params.banned_token_ids, vocab_size)
    _check_usable(request, vocab_size)
    if params.drafter is not None and params.drafter not in drafters:
        msg = (
            f"drafter {params.drafter!r} is not loaded; a request may name "
            f"{' or '.join(repr(name) for name in drafters)}; name one, leave it out, or build the "
            "engine with that drafter (several together are: merged)"
        )
        raise RequestError(msg)


def _check_usable(request: Request, vocab_size: int) -> None:
    """Refuse options that leave no token to be emitted, now or before `min_tokens`."""
    params, banned = request.params, set(request.params.banned_token_ids)
    if params.allowed_token_ids is not None:
        usable = set(params.allowed_token_ids) - banned
        if not usable:
            msg = "every allowed token id is also banned, so nothing could be emitted; ban fewer"
            raise RequestError(msg)
        if params.min_tokens > 0 and usable <= request.stop_ids:
            msg = (
                "all allowed token ids are stop ids, which min_tokens bans; allow another id or "
                "set min_tokens to 0"
            )
            raise RequestError(msg)
        return
    if len(banned) >= vocab_size:
        msg = "banned_token_ids holds the whole vocabulary, so nothing could be emitted; ban fewer"
        raise RequestError(msg)
    # Counted first: the union is only made of what could fill the vocabulary.
    fewest = vocab_size - len(banned)
    if params.min_tokens > 0 and len(request.stop_ids) >= fewest:
        ends = {i for i in request.stop_ids if 0 <= i < vocab_size}
        if len(ends | banned) >= vocab_size:
            msg = (
                "every token id that is not banned is a stop id, which min_tokens bans; leave an id "
                "out of stop_token_ids or banned_token_ids, or set min_tokens to 0"
            )
            raise RequestError(msg)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    given: Iterable[object] = ids
    odd = [i for i in given if not isinstance(i, Integral) or isinstance(i, bool)]
    if odd:
        msg = f"{name}: {odd[0]!r} is no token id; ids are whole numbers 0 ... {vocab_size - 1}"
        raise RequestError(msg)
    bad = [i for i in ids if not 0 <= i < vocab_size]
    if bad:
        shown = ", ".join(str(i) for i in bad[:5]) + (", ..." if len(bad) > 5 else "")
        msg = f"{name}: {shown} outside the vocabulary of {vocab_size} ids (0 ... {vocab_size - 1})"
        raise RequestError(msg)
