"""Reads the sampling options of a request: fields of a body -> `SamplingParams` and a scope."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.api.server.context import NO_DRAFTER
from paceline.api.server.errors import api_error, bad, shown
from paceline.core.errors import RequestError, quoted
from paceline.core.request import SamplingParams

if TYPE_CHECKING:
    from paceline.api.server.context import Context
    from paceline.api.server.protocol import Speculative
    from paceline.api.server.protocol_sampling import SamplingFields
    from paceline.api.tokenizer import Tokenizer

TOO_LONG = "context_length_exceeded"
_PLAIN = (  # fields that have the same name and meaning in SamplingParams
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "n",
    "stop",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
)


def params_of(
    body: SamplingFields, context: Context, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """The sampling options of a request.

    Args:
        body: the request.
        context: what is served.
        max_tokens: most tokens per answer (`token_limit`).
        logprobs: log-probabilities asked for, as `SamplingParams.logprobs` counts them.

    Raises:
        ApiError: 400, naming the field where one is at fault.
    """
    given = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    if body.spaces_between_special_tokens:
        msg = (
            "spaces_between_special_tokens: text is put together without added spaces, whatever its "
            "tokens; false is possible; leave it out"
        )
        raise bad(msg, "spaces_between_special_tokens")
    for name in ("stop_token_ids", "allowed_token_ids"):
        ids = getattr(body, name)
        if ids is not None:
            given[name] = tuple(check_ids(name, ids, context.vocab_size))
    if body.logit_bias:
        given["logit_bias"] = _bias(body.logit_bias, context.vocab_size)
    if body.bad_words:
        given["banned_token_ids"] = _banned(body.bad_words, context.tokenizer)
    if body.speculative is not None:
        given["num_speculative_tokens"] = _most_drafts(body.speculative, context)
        if body.speculative.method in context.parts:
            given["drafter"] = body.speculative.method
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        msg = (
            f"min_tokens {body.min_tokens} is above the {max_tokens} tokens that the answer may "
            "have; lower it, or raise max_tokens"
        )
        raise bad(msg, "min_tokens")
    try:
        return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs)
    except RequestError as error:
        raise api_error(error, param=_named_in(str(error))) from error


def check_stream(body: SamplingFields) -> None:
    """Refuse options of a stream where none is asked for.

    Raises:
        ApiError: 400.
    """
    if body.stream_options is not None and not body.streams:
        msg = (
            "stream_options says what a stream tells, and none is asked for; set `stream: true`, or "
            "leave it out"
        )
        raise bad(msg, "stream_options")


def token_limit(
    asked: int | None,
    default: int | None,
    prompts: Sequence[Sequence[int]],
    context: Context,
    *,
    field: str = "max_tokens",
) -> int:
    """Most tokens of each answer.

    Args:
        asked: what the request says.
        default: where it says nothing; None: whatever the context leaves.
        prompts: token ids; none is empty.
        context: what is served.
        field: what the request calls it.

    Raises:
        ApiError: 400 with the code "context_length_exceeded"; a prompt, or a prompt with its answer,
            does not fit.
    """
    longest = max(len(ids) for ids in prompts)
    left = context.max_len - longest
    if left < 1:
        msg = (
            f"the model's maximum context length is {context.max_len} tokens, and the prompt has "
            f"{longest}; at least one must be left for the answer, which has one in the making also where "
            "max_tokens 0 shows none; shorten the prompt, or let truncate_prompt_tokens do it"
        )
        raise bad(msg, "messages" if default is None else "prompt", code=TOO_LONG)
    if asked is None:
        return left if default is None else min(default, left)
    if asked > left:
        msg = (
            f"the model's maximum context length is {context.max_len} tokens, and {longest} of the "
            f"prompt with {asked} of the answer are more; at most {left} are left for the answer; "
            f"lower {field} or shorten the prompt"
        )
        raise bad(msg, field, code=TOO_LONG)
    return asked


def truncated(
    ids: Sequence[int], room: int, body: SamplingFields, context: Context
) -> Sequence[int]:
    """The prompt's last tokens, as many as the request keeps.

    Args:
        ids: the prompt.
        room: tokens that the answer needs at least.
        body: the request.
        context: what is served.

    Raises:
        ApiError: 400; it keeps none.
    """
    most = body.truncate_prompt_tokens
    if most is None:
        return ids
    if most == 0:
        msg = (
            "truncate_prompt_tokens 0 leaves no prompt; 1 or more, or -1 for what fits, is possible; "
            "give one of these"
        )
        raise bad(msg, "truncate_prompt_tokens")
    if most < 0:
        most = context.max_len - room
    return ids[-most:] if most > 0 else ids


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> Iterable[int]:
    """The same ids, if all are in the vocabulary.

    Raises:
        ApiError: 400, naming the field.
    """
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        msg = (
            f"{name}: {quoted(wrong)} is no token id; the vocabulary has {vocab_size} ids (0 ... "
            f"{vocab_size - 1}); check where the ids come from"
        )
        raise bad(msg, name)
    return ids


def scope_of(body: SamplingFields, tenant: str) -> str:
    """Who shares cached prefixes and suffixes: those with the same tenant and salt.

    `cache_prompt: false` shares with nobody.

    Args:
        body: the request.
        tenant: whom the server tells apart by key; "" for all.
    """
    salt = body.cache_salt or ""
    own = secrets.token_hex(16) if body.cache_prompt is False else ""
    # As JSON, so that no salt of one tenant can spell the scope of another.
    return json.dumps([tenant, salt, own]) if tenant or salt or own else ""


def _bias(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 12):  # also no signs or spaces
            msg = f"logit_bias: {quoted(key)} is no token id; write the id as a string of digits"
            raise bad(msg, "logit_bias")
        if not -100 <= value <= 100:
            msg = (
                f"logit_bias: {value!r} of token {key} is out of range; -100 ... 100 is possible; give "
                "a value in it"
            )
            raise bad(msg, "logit_bias")
        if int(key) in found:
            msg = f"logit_bias: {quoted(key)} is token {int(key)}, which is there already; give it once"
            raise bad(msg, "logit_bias")
        found[int(key)] = value
    check_ids("logit_bias", found, vocab_size)
    return found


def _banned(words: Sequence[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that spell a bad word, at the beginning of a text and after a space.

    Raises:
        ApiError: 400; a word is no single token, so banning it would need to look back.
    """
    banned: dict[int, None] = {}
    for word in words:
        if not word:
            msg = "bad_words has an empty string; words of one token can be banned; leave it out"
            raise bad(msg, "bad_words")
        try:
            bare = tokenizer.encode(word, add_special_tokens=False)
            spaced = tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False)
        except RequestError as error:
            raise api_error(error, param="bad_words") from error
        if len(bare) != 1 or (len(spaced) != 1 and spaced[-1] != bare[0]):
            msg = (
                f"bad_words: {quoted(word)} is {max(len(bare), len(spaced))} tokens of this model; "
                "words of one token can be banned; leave it out, or use logit_bias on its tokens"
            )
            raise bad(msg, "bad_words")
        banned[bare[0]] = None
        if len(spaced) == 1:
            banned[spaced[0]] = None
    return tuple(banned)


def _most_drafts(asked: Speculative, context: Context) -> int | None:
    """What `speculative` says about the number of drafts; 0 is none, None is the server's own."""
    loaded = context.drafter
    possible = dict.fromkeys((loaded, *context.parts, NO_DRAFTER))
    if asked.method is not None and asked.method not in possible:
        msg = (
            f"speculative.method {quoted(asked.method)} is not loaded; this server has "
            f"{' and '.join(repr(name) for name in possible)}; choose one of these, or start a server "
            "with the other drafter (several at once: --spec merged)"
        )
        raise bad(msg, "speculative.method")
    off = asked.enabled is False or asked.method == NO_DRAFTER
    if asked.enabled and asked.method == NO_DRAFTER:
        msg = (
            "speculative is enabled, with the method 'none', which is none; one of the two is possible; "
            "leave one out"
        )
        raise bad(msg, "speculative.method")
    if not off and loaded == NO_DRAFTER and (asked.enabled or asked.num_speculative_tokens):
        msg = (
            "speculative: this server has no drafter loaded; `enabled: false` is possible; leave it "
            "out, or start a server with a drafter (--spec)"
        )
        raise bad(msg, "speculative")
    if off and asked.num_speculative_tokens:
        msg = (
            f"speculative: {asked.num_speculative_tokens} tokens are to be drafted and speculation "
            "is off; give one of the two"
        )
        raise bad(msg, "speculative.num_speculative_tokens")
    return 0 if off else asked.num_speculative_tokens


def _named_in(message: str) -> str | None:
    """The option that a message of `SamplingParams` begins with."""
    clause = message.partition(": ")[2]
    name = clause.split(" ", 1)[0]
    names: Mapping[str, Any] = SamplingParams.__dataclass_fields__
    return shown(name) if name in names else None
