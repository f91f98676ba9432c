"""Which values sampling options may have, and how many: every rule with its message.

Values may come straight from JSON, so types are checked too. Sizes are bounded because a list
without a bound is memory without a bound.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.core.request import SamplingParams

MAX_TOP_LOGPROBS = 20
MAX_DEVICE_STOP_IDS = 16  # a longer list is looked through by the host
MAX_BIAS = 1024  # entries of logit_bias
MAX_SAMPLES = 128  # answers to one prompt
MAX_STOPS = 256  # stop strings
MAX_STOP_LEN = 1024  # characters of one
MAX_TOKEN_IDS = 1 << 20  # of a list of token ids; more than any vocabulary
_MORE = "ask again, with another seed, for more answers"
_INT64 = 1 << 63
_MOST_PENALTY = 1e6  # far beyond sense; much more leaves float32, where 0 * inf is no number


def problems_of(given: SamplingParams) -> list[str]:
    """Everything that is wrong with these options, one clause each."""
    return [text for ok, text in _rules(given) if not ok]


def _rules(given: SamplingParams) -> list[tuple[bool, str]]:
    # Annotations bind nobody: values may come straight from JSON.
    bias: object = given.logit_bias
    only: object = given.allowed_token_ids
    stop: object = given.stop
    flags: Mapping[str, object] = {
        "ignore_eos": given.ignore_eos,
        "skip_special_tokens": given.skip_special_tokens,
        "include_stop_str_in_output": given.include_stop_str_in_output,
    }
    rep = given.repetition_penalty
    return [
        *(
            (
                _within(value, low, high),
                f"{name} {value!r} not in {low} ... {high}; pass a number in that range",
            )
            for name, value, low, high in (
                ("temperature", given.temperature, 0, 100),
                ("min_p", given.min_p, 0, 1),
                ("presence_penalty", given.presence_penalty, -2, 2),
                ("frequency_penalty", given.frequency_penalty, -2, 2),
            )
        ),
        (
            _within(given.top_p, 0, 1) and given.top_p > 0,
            f"top_p {given.top_p!r} not in (0, 1]; use 1 to switch it off",
        ),
        (
            _whole(given.top_k, -1),
            f"top_k {given.top_k!r} must be a whole number >= -1; 0 or -1 switch it off",
        ),
        (
            _within(rep, 1e-6, _MOST_PENALTY),
            f"repetition_penalty {rep!r} must be a number > 0, in 1e-6 ... 1e6",
        ),
        (
            isinstance(bias, Mapping)
            and _are_ids(bias.keys())
            and all(_within(b, -100, 100) for b in bias.values()),
            "logit_bias must map token ids (whole numbers) to values in -100 ... 100",
        ),
        *(
            (
                not isinstance(entries, Collection) or len(entries) <= most,
                f"{name} has too many entries; at most {most:,} are possible; leave some out",
            )
            for name, entries, most in (
                ("logit_bias", bias, MAX_BIAS),
                ("stop", stop, MAX_STOPS),
                ("stop_token_ids", given.stop_token_ids, MAX_TOKEN_IDS),
                ("allowed_token_ids", only, MAX_TOKEN_IDS),
                ("banned_token_ids", given.banned_token_ids, MAX_TOKEN_IDS),
            )
        ),
        *(
            (_are_ids(ids), f"{name} must be a list of token ids (whole numbers)")
            for name, ids in (
                ("allowed_token_ids", () if only is None else only),
                ("banned_token_ids", given.banned_token_ids),
                ("stop_token_ids", given.stop_token_ids),
            )
        ),
        (
            not isinstance(only, Collection) or len(only) > 0,
            "allowed_token_ids is empty, so nothing could be emitted; pass None for all",
        ),
        *(
            (_whole(value, low), f"{name} {value!r} must be >= {low}, a whole number")
            for name, value, low in (
                ("max_tokens", given.max_tokens, 1),
                ("min_tokens", given.min_tokens, 0),
                ("num_speculative_tokens", given.num_speculative_tokens, 0),
            )
            if not (name == "num_speculative_tokens" and value is None)
        ),
        (
            not _whole(given.max_tokens, 1)
            or not _whole(given.min_tokens, 0)
            or given.min_tokens <= given.max_tokens,
            f"min_tokens {given.min_tokens} is above max_tokens {given.max_tokens}",
        ),
        (
            _whole(given.n, 1) and given.n <= MAX_SAMPLES,
            f"n {given.n!r} must be a whole number in 1 ... {MAX_SAMPLES}; {_MORE}",
        ),
        (
            _are_texts(stop),
            "stop must be non-empty strings; remove what is empty or no string",
        ),
        (
            not _are_texts(stop) or all(_is_unicode(text) for text in given.stop),
            "stop has a string with unpaired surrogates, which no answer holds; clean it first",
        ),
        (
            not _are_texts(stop) or all(len(text) <= MAX_STOP_LEN for text in given.stop),
            f"stop has a string of more than {MAX_STOP_LEN:,} characters; shorten it",
        ),
        (
            given.seed is None or _whole(given.seed, -_INT64),
            f"seed {given.seed!r} must be a whole number that fits 64 bits",
        ),
        (
            given.logprobs is None
            or (_whole(given.logprobs, 0) and given.logprobs <= MAX_TOP_LOGPROBS),
            f"logprobs {given.logprobs!r} must be None or 0 ... {MAX_TOP_LOGPROBS}",
        ),
        *(
            (isinstance(value, bool), f"{name} {value!r} must be true or false")
            for name, value in flags.items()
        ),
    ]


def _within(x: object, low: float, high: float) -> bool:
    """A number in a range; NaN is in none, and a truth value is no number."""
    if isinstance(x, bool) or not isinstance(x, int | float | Real):
        return False
    return bool(low <= x <= high)  # type: ignore[operator]  # Real declares no order with float


def _whole(x: object, low: int) -> bool:
    """A whole number that the 64-bit columns of the sampling table hold."""
    return isinstance(x, int) and not isinstance(x, bool) and low <= x < _INT64


def _are_texts(x: object) -> bool:
    """A collection of non-empty strings; one that can be walked over more than once."""
    if not isinstance(x, Collection) or isinstance(x, str | bytes | Mapping):
        return False
    return all(isinstance(text, str) and text for text in x)


def _is_unicode(text: str) -> bool:
    """Whether every character can stand in a text; Python's strings may hold halves of pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_ids(x: object) -> bool:
    if not isinstance(x, Collection) or isinstance(x, str | bytes | Mapping):
        return False
    return all(isinstance(i, Integral) and not isinstance(i, bool) for i in x)
