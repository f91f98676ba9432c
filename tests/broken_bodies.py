"""Bodies that are no JSON object, and values that JSON does not have; for every path the same. No tests here."""

from __future__ import annotations

from collections.abc import Mapping

# Body -> what the answer says of it, among other things.
NO_OBJECT: Mapping[str, str] = {
    "": "line 1",
    "{": "line 1",
    "not json": "line 1",
    "[]": "body",
    "null": "body",
    "5": "body",
    '"text"': "body",
    "[" * 200_000: "nested",
}
# A field of a body that is good otherwise -> the same.
NO_VALUE: Mapping[str, str] = {
    '"x": NaN': "NaN",
    '"x": [Infinity]': "Infinity",
    '"temperature": -Infinity': "Infinity",
    '"temperature": 1e999': "too large",
    '"seed": ' + "9" * 6000: "digits",
    '"x": ' + "[" * 200_000: "nested",
}


def bodies(good: str) -> list[str]:
    """All of them, for a path that takes this body, a JSON object with at least one field."""
    return [*NO_OBJECT, *(f"{good[:-1]}, {field}}}" for field in NO_VALUE)]
