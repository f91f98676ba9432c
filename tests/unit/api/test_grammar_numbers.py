"""Numbers of a schema that would not be kept to the last digit are refused by name, others served."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.api.grammar import ConstraintError, Constraints
from tests import tiny_tokenizers

SIZE = 416
TWO_53, TWO_63 = 2**53, 2**63


@pytest.fixture(scope="module")
def constraints() -> Constraints:
    return Constraints(tiny_tokenizers.byte_level(), SIZE)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "minimum": ({"type": "integer", "minimum": 10**20, "maximum": 10**20 + 5}, r"minimum \(at #\)"),
    "maximum": ({"items": {"maximum": TWO_53 + 3}}, r"maximum \(at #/items\): 9007199254740995;"),
    "excluded": ({"type": "integer", "exclusiveMinimum": TWO_53}, r"exclusiveMinimum.*2\^53"),
    "enum": ({"enum": [1, 2**64 + 1]}, r"enum \(at #\): 18446744073709551617; whole numbers"),
    "const": ({"const": TWO_53 + 1}, r"const \(at #\): 9007199254740993; whole numbers"),
    "within": ({"const": {"a": [{"b": TWO_53 + 1}]}}, r"const \(at #\): 9007199254740993"),
    "behind a reference": ({"$ref": "#/x", "x": {"const": TWO_53 + 1}}, r"const \(at #/x\)"),
    "a property's name": (
        {"properties": {"default": {"const": TWO_53 + 1}}},
        r"const \(at #/properties/default\)",
    ),
    "digits": ({"const": 123456789.12345679}, "22 decimals and 15 digits"),
    "decimals": ({"type": "number", "minimum": 1e-300}, r"minimum \(at #\): 1e-300; .*22 decimals"),
    "huge": ({"const": 1e300}, "whole numbers"),
    "counts": ({"type": "string", "maxLength": 2**32}, r"maxLength \(at #\): .* 4294967295"),
    "steps": (
        {"type": "integer", "multipleOf": 2**31},
        r"multipleOf \(at #\): 2147483648; .*10000",
    ),
    "steps together": (
        {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
        r"multipleOf .* 988027",
    ),
    "steps with decimals": ({"type": "number", "multipleOf": 1.14}, "too many digits"),
    "near": (
        {"allOf": [{"exclusiveMinimum": 1}, {"maximum": 1.5}]},
        r"exclusiveMinimum \(at #\): 1; an excluded whole number",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refusals(constraints: Constraints, case: str) -> None:
    """The keyword, its place, the number, the limit."""
    schema, told = BAD[case]
    with pytest.raises(ConstraintError, match=f"(?s){told}") as caught:
        constraints.json_schema(schema)
    assert caught.value.keywords
    assert ";" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_what_other_tools_write_is_served(constraints: Constraints) -> None:
    """The largest numbers of a language, as bounds that an answer of fewer digits keeps."""
    for schema in (
        {"type": "integer", "minimum": 1 - TWO_53, "maximum": TWO_53 - 1},
        {"type": "integer", "minimum": 0, "maximum": TWO_63 - 1},
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
        {"type": "string", "maxLength": 2**31 - 1},
        {"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.01},
        {"type": "integer", "default": TWO_53 + 1, "examples": [{"const": 2**64 + 1}]},
        {"type": "object", "properties": {"multipleOf": {"const": 3}, "const": {"maximum": 7}}},
    ):
        constraints.json_schema(schema)


def test_no_depth_is_too_much() -> None:
    """Deeply nested schemas are refused, not followed to the end of the stack."""
    schema: dict[str, Any] = {"exclusiveMinimum": 0}
    for _ in range(450):
        schema = {"allOf": [schema]}
    with pytest.raises(ConstraintError, match=r"recursion|too deeply"):
        Constraints(tiny_tokenizers.byte_level(), SIZE).json_schema(schema)
