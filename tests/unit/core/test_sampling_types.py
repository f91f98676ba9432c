"""SamplingParams of wrong types and out-of-range sizes: one clear error, never a TypeError."""

from __future__ import annotations

import pytest

from paceline.core.errors import RequestError
from paceline.core.request import SamplingParams

BAD = [
    {"temperature": "0.5"},
    {"temperature": None},
    {"temperature": [1]},
    {"temperature": 1j},
    {"temperature": True},
    {"temperature": 10**400},
    {"top_p": "1"},
    {"repetition_penalty": True},
    {"repetition_penalty": 1e-320},
    {"repetition_penalty": 1e308},
    {"stop": ["a", 5]},
    {"stop": None},
    {"stop": b"x"},
    {"stop": 5},
    {"stop": ["lone \ud800 surrogate"]},
    {"stop": ["fine", "\udfff"]},
    {"stop_token_ids": 5},
    {"stop_token_ids": None},
    {"stop_token_ids": ["x"]},
    {"stop_token_ids": [2.0]},
    {"stop_token_ids": "12"},
    {"logit_bias": [1]},
    {"logit_bias": None},
    {"logit_bias": {"5": 1}},
    {"logit_bias": {5.0: 1}},
    {"logit_bias": {5: "x"}},
    {"allowed_token_ids": "abc"},
    {"allowed_token_ids": [1.5]},
    {"allowed_token_ids": [True]},
    {"banned_token_ids": None},
    {"banned_token_ids": (i for i in [3])},
    {"min_tokens": 1 << 63, "max_tokens": 1 << 63},
    {"max_tokens": 1 << 63},
    {"top_k": 1 << 63},
    {"num_speculative_tokens": 1 << 63},
    {"ignore_eos": "yes"},
    {"skip_special_tokens": None},
    {"include_stop_str_in_output": 1},
]


@pytest.mark.parametrize("fields", BAD, ids=[f"{i}-{next(iter(b))}" for i, b in enumerate(BAD)])
def test_wrong_types_and_sizes_are_named(fields: dict[str, object]) -> None:
    """A caller who passes JSON through learns which field is wrong."""
    with pytest.raises(RequestError, match=next(iter(fields))):
        SamplingParams(**fields)


LIMITS = {
    "n": (
        {"n": 129},
        r"n 129 must be a whole number in 1 \.\.\. 128; ask again, with another seed",
    ),
    "logprobs": ({"logprobs": 21}, r"logprobs 21 must be None or 0 \.\.\. 20"),
    "bias": ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias .* at most 1,024"),
    "stops": ({"stop": [str(i) for i in range(257)]}, "stop has too many entries; at most 256"),
    "long stop": ({"stop": ["x" * 1025]}, "a string of more than 1,024 characters"),
    "stop ids": ({"stop_token_ids": range((1 << 20) + 1)}, "stop_token_ids .* at most 1,048,576"),
    "allowed": ({"allowed_token_ids": range((1 << 20) + 1)}, "allowed_token_ids .* at most"),
    "banned": ({"banned_token_ids": range((1 << 20) + 1)}, "banned_token_ids .* at most"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_sizes_have_limits_that_are_stated(name: str) -> None:
    """One request may not take all of a machine's memory; the error says how much is possible."""
    fields, message = LIMITS[name]
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)


def test_limits_are_possible_themselves() -> None:
    """The stated number is the last that is taken."""
    SamplingParams(
        n=128,
        logprobs=20,
        logit_bias=dict.fromkeys(range(1024), 1.0),
        stop=[f"{i:x>1024}" for i in range(256)],
    )


def test_all_wrong_types_are_reported_at_once() -> None:
    """One error names every field, so that a caller repairs them in one go."""
    with pytest.raises(RequestError) as error:
        SamplingParams(temperature="x", stop=5, logit_bias=None, ignore_eos=0)
    for name in ("temperature", "stop", "logit_bias", "ignore_eos"):
        assert name in str(error.value)


def test_plain_collections_and_numbers_are_taken() -> None:
    """Sets, tuples and whole numbers where fractions are possible are no errors."""
    SamplingParams(
        temperature=1,
        top_p=1,
        stop=("a",),
        stop_token_ids={3},
        banned_token_ids=frozenset({4}),
        allowed_token_ids=range(5),
        logit_bias={3: 1},
    )
