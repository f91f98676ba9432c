"""Numbers in a JSON schema that llguidance would keep otherwise than they are written.

It holds every number as a float64 and the bounds of integers in 64 bits, so an answer could break a bound,
or say another number than the schema's. What an answer might show is refused; a bound that only becomes
narrower (a maximum of 2^64 - 1) is not.

Not here: what llguidance refuses itself (grammar_refusals.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction

from paceline.api.grammar_text import ConstraintError

EXACT = 1 << 53  # up to it every whole number is a float of its own
MAX_COUNT = (1 << 32) - 1
MAX_MULTIPLE = 10_000  # an automaton has a state for each remainder
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_VALUES = ("const", "enum")
_REMARKS = ("default", "examples", "example")
_COMBINING = (*_IN_PLACE, "$ref")
_EXACT_DECIMALS = 22  # 10^22 is the last power of ten that a float64 holds
_WHOLE = (
    f"whole numbers up to {EXACT} (2^53) are kept exactly, and up to 2^63 those that end in zeros"
)
_FRACTIONS = f"numbers of up to {_EXACT_DECIMALS} decimals and 15 digits are kept exactly"
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


def check_numbers(schema: Mapping[str, object]) -> None:
    """Refuse numbers that would not be kept.

    Args:
        schema: as `read_schema` returns it.

    Raises:
        ConstraintError: names the keyword, its place and the limit.
    """
    multiples: list[Fraction] = []
    holders: dict[str, Mapping[str, object]] = {}  # of bounds, by their place
    combined = excluded = False
    for keyword, value, at, holder in _keywords(schema):
        combined |= keyword in _COMBINING
        if keyword in _BOUNDS or keyword in _IN_PLACE:
            holders[at] = holder
        excluded |= keyword.startswith("exclusive")
        if keyword in _VALUES:
            for number in _numbers(value):
                if not _is_kept(number):
                    limit = (
                        f"{_WHOLE if number == int(number) else _FRACTIONS}; use others, or strings"
                    )
                    raise _refused(keyword, at, number, limit)
        elif not isinstance(value, int | float) or isinstance(value, bool):
            continue
        elif keyword in _COUNTS and value > MAX_COUNT:
            limit = f"counts up to {MAX_COUNT} are possible; write a smaller one, or leave it out"
            raise _refused(keyword, at, value, limit)
        elif keyword in _BOUNDS:
            _check_bound(keyword, value, at)
        elif keyword == "multipleOf" and value:
            multiples.append(abs(Fraction(repr(value))))
            _check_multiple(multiples[-1], keyword, value, at)
    for at, holder in holders.items() if excluded else ():
        _check_pairs(holder, at)
    if combined and multiples:
        common = multiples[0]
        for one in multiples[1:]:
            common = Fraction(
                math.lcm(common.numerator, one.numerator),
                math.gcd(common.denominator, one.denominator),
            )
            _check_multiple(common, "multipleOf", f"(together) {common}", "#")


def _check_bound(keyword: str, value: float, at: str) -> None:
    if abs(value) > EXACT or (keyword.startswith("exclusive") and abs(value) == EXACT):
        step = 1.0 if keyword == "exclusiveMinimum" else -1.0 if "exclusive" in keyword else 0.0
        kept = max(_LOWEST, min(_HIGHEST, int(float(value) + step)))
        inner = kept - int(value) if keyword.lower().endswith("minimum") else int(value) - kept
        if inner < 0 or (step and not inner):
            limit = f"whole numbers up to {EXACT} (2^53) are kept exactly; use a smaller one"
            raise _refused(keyword, at, value, limit)
    elif not _is_kept(value):
        raise _refused(keyword, at, value, f"{_FRACTIONS}; use a shorter one")


def _check_pairs(schema: Mapping[str, object], at: str) -> None:
    """Where less than 1 lies between two bounds llguidance takes in a whole one that is excluded."""
    bounds = [] if schema.get("type") == "integer" else list(_in_place(schema))
    below = {math.floor(v) for k, v in bounds if k in ("maximum", "exclusiveMaximum") and v % 1}
    above = {math.ceil(v) for k, v in bounds if k in ("minimum", "exclusiveMinimum") and v % 1}
    for keyword, value in bounds:
        near = {"exclusiveMinimum": below, "exclusiveMaximum": above}.get(keyword, ())
        if value in near:
            limit = (
                "an excluded whole number can be served where the other bound is at least 1 away from it; "
                "exclude a number with decimals"
            )
            raise _refused(keyword, at, value, limit)


def _in_place(schema: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Bounds that hold for one and the same value."""
    left: list[object] = [schema]
    while left:
        one = left.pop()
        if not isinstance(one, Mapping):
            continue
        for keyword in _BOUNDS:
            value = one.get(keyword)
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield keyword, value
        for keyword in _IN_PLACE:
            branches = one.get(keyword)
            left += branches if isinstance(branches, list) else ()


def _check_multiple(multiple: Fraction, keyword: str, value: object, at: str) -> None:
    digits = multiple * 10 ** _decimals(multiple)
    if digits > MAX_MULTIPLE:
        limit = (
            f"steps of up to {MAX_MULTIPLE}, without their decimal point, are possible, several that may meet in "
            "one place together; use a rounder one, or check the answer afterwards"
        )
        raise _refused(keyword, at, value, limit)


def _decimals(value: Fraction) -> int:
    """Digits after the decimal point of a number that has an end."""
    twos, rest = 0, value.denominator
    while rest % 2 == 0:
        rest //= 2
        twos += 1
    fives = 0
    while rest % 5 == 0:
        rest //= 5
        fives += 1
    return max(twos, fives)


def _is_kept(number: float) -> bool:
    """Whether it is read as the float64 that it is, and stays itself as that one's shortest digits."""
    if abs(number) <= EXACT and float(number).is_integer():
        return True
    _, digits, exponent = Decimal(repr(float(number))).normalize().as_tuple()
    assert isinstance(exponent, int), "JSON has finite numbers only"
    shortest = int("".join(map(str, digits)))
    if exponent >= 0:
        return abs(number) <= _HIGHEST and abs(int(number)) == shortest * 10**exponent
    return shortest <= EXACT and -exponent <= _EXACT_DECIMALS


def _refused(keyword: str, at: str, value: object, limit: str) -> ConstraintError:
    shown = str(value) if len(str(value)) <= 50 else f"a number of {len(str(value))} digits"
    return ConstraintError(f"the JSON schema has {keyword} (at {at}): {shown}; {limit}", [keyword])


def _numbers(value: object) -> Iterator[float]:
    """Numbers of a JSON value, at any depth."""
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _numbers(one)
    elif isinstance(value, list):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _keywords(
    schema: object, at: str = "#"
) -> Iterator[tuple[str, object, str, Mapping[str, object]]]:
    """All keywords, with their values, the place of the schema that holds them, and that schema.

    Unknown ones are looked into: a $ref may lead there.
    """
    if isinstance(schema, list):
        for i, one in enumerate(schema):
            yield from _keywords(one, f"{at}/{i}")
        return
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        yield key, value, at, schema
        here = f"{at}/{_escaped(key)}"
        if key in _NAMED and isinstance(value, Mapping):
            for name, one in value.items():
                yield from _keywords(one, f"{here}/{_escaped(name)}")
        elif key not in _VALUES and key not in _REMARKS:
            yield from _keywords(value, here)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
