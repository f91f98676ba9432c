"""JSON on the wire: what the compiled encoder gives, and what it refuses, mean the same to every client."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.api.server.encoding import encoded


@dataclass
class Point:
    x: int


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
TEXT = st.text(st.characters(codec=None))  # half characters too
VALUES = st.recursive(
    SCALARS | TEXT, lambda v: st.lists(v, max_size=4) | st.dictionaries(TEXT, v, max_size=4)
)


@given(VALUES)
@example("\ud83d\ude00")
@example({"\ud83d\ude00": 1, "🙂": 1 << 70})
def test_it_means_what_was_given_and_is_one_line(value: object) -> None:
    """Half characters, large integers and all line ends of Unicode among it.

    Two halves side by side are one character to JSON, so what they mean is what Python's encoder says.
    """
    data = encoded(value)
    assert json.loads(data) == json.loads(json.dumps(value))
    assert len(data.decode().splitlines()) == 1


@pytest.mark.parametrize(
    "value, data",
    [
        ({"a": (1, None, True)}, b'{"a":[1,null,true]}'),
        ("é🙂/", '"é🙂/"'.encode()),
        ("\ud83d", b'"\\ud83d"'),
        ("“\u2028”\x85", '"“\\u2028”\\u0085"'.encode()),
        ({"\ud83d": 1 << 64}, b'{"\\ud83d":18446744073709551616}'),
        ([math.nan, -math.inf], b"[null,null]"),
        ({"a": ([math.nan],), "b": "\ud83d"}, b'{"a":[[null]],"b":"\\ud83d"}'),
    ],
    ids=[
        "short",
        "as it is",
        "half a character",
        "line ends",
        "a large number",
        "no numbers",
        "no number beside half a character",
    ],
)
def test_bytes(value: object, data: bytes) -> None:
    """No blanks, and as few escapes as there can be."""
    assert encoded(value) == data


def test_what_json_does_not_have_is_an_error() -> None:
    """Not the text of it."""
    for value in (object(), datetime.now(UTC), Point(1), b"bytes", {1, 2}):
        with pytest.raises(TypeError):
            encoded({"a": value})
