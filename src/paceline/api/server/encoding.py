"""JSON as it goes over the wire: one line of UTF-8 that every client splits in the same way.

A server with many streams encodes a small object for every row of every step, so the encoder is a
compiled one (orjson). What that refuses though JSON has it goes through Python's: half characters of a
model that was cut within one, and integers of more than 64 bits in what a client sent.

Not for: reading (bodies.py), and what is kept or prompted with.
"""

from __future__ import annotations

import json
import math

import orjson

# Ends of lines to Unicode, and to clients that split a stream as Python does; not to JSON or to SSE.
_LINE_ENDS = tuple((c.encode(), b"\\u%04x" % ord(c)) for c in "\x85\u2028\u2029")
_BEGIN_LIKE_ONE = b"\xc2\x85", b"\xe2\x80"
# Values that are no JSON are mistakes, also those that orjson would put into words.
_STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_python = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def encoded(value: object) -> bytes:
    """JSON as UTF-8, in one line; half characters, which UTF-8 cannot hold, become escapes.

    Args:
        value: of dicts with strings for keys, lists, tuples, strings, booleans, None and numbers; NaN and
            infinities, which JSON does not have, become null, as in JavaScript.

    Raises:
        TypeError: it holds something else.
    """
    try:
        data = orjson.dumps(value, option=_STRICT)
    except TypeError:
        data = _python(_finite(value)).encode("utf-8", "backslashreplace")
    next_line, separators = _BEGIN_LIKE_ONE
    if separators in data or next_line in data:
        for end, escape in _LINE_ENDS:
            data = data.replace(end, escape)
    return data


def _finite(value: object) -> object:
    """The same with None for what is no finite number, as orjson has it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
