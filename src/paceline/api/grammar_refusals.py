"""What a client is told of a constraint that llguidance does not take: the keyword, where it stands, what to do.

The library's own words name keywords only sometimes, and speak of options that are not a client's to set.

Not here: what is refused before llguidance sees it (grammar_text.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from paceline.api.grammar_text import ConstraintError

MAX_REASON = 600  # characters of the library's words
_Schema = Mapping[str, object]
_KEYWORD = re.compile(r"[a-zA-Z$]+")
# Keywords whose value is a schema, a list of schemas, or schemas by name; others hold values.
_ONE = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_ONE_TOO = ("unevaluatedItems", "unevaluatedProperties", "contentSchema", "additionalItems")
_LIST = ("prefixItems", "allOf", "anyOf", "oneOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_MOST_STEPS = 50  # along references, which may lead back
_REFERENCES = ("$schema", "$ref", "$dynamicRef")


def refusal(kind: str, reason: str, schema: _Schema | None = None) -> ConstraintError:
    """The error for a constraint that llguidance does not take.

    Args:
        kind: what was asked for: "JSON schema", "regex", ...
        reason: the library's words.
        schema: the one that was given, if any.
    """
    reason = reason.partition("<state>")[0].strip()[:MAX_REASON]
    unknown = re.match(r"Unimplemented keys: \[(.*)\]", reason)
    if unknown:
        names = [name.strip(' "') for name in unknown[1].split(",")]
        places = ", ".join(f"{name} ({_where(schema, name)})" for name in names)
        msg = (
            f"the {kind} uses {places}, which structured output does not serve; "
            "docs/structured-output.md lists what it does; write it without, or check the answer afterwards"
        )
        return ConstraintError(msg, names)
    if reason.startswith("oneOf"):
        msg = (
            f"the {kind} uses oneOf ({_where(schema, 'oneOf')}) with branches that one answer might fit at "
            "once, which structured output does not serve; branches of which one at most can fit are possible; "
            "tell them apart by type, or by a required property with a const of its own, or write anyOf"
        )
        return ConstraintError(msg, ["oneOf"])
    keyword, place, reason = _blamed(reason, schema)
    because = f" because of {keyword} ({place})" if keyword else ""
    msg = (
        f"the {kind} is refused{because}: {reason}; docs/structured-output.md lists what is possible; "
        "correct or simplify it"
    )
    return ConstraintError(msg, [keyword] if keyword else [])


def _blamed(reason: str, schema: _Schema | None) -> tuple[str, str, str]:
    """Keyword ("": none), where it stands, and the reason in words that fit a client."""
    if schema is None:
        return "", "", reason
    if remote := re.search(r"Resource '([^']*)' is not present", reason):
        url = remote[1]
        keyword = next((k for k in _REFERENCES if _names(schema, k, url)), "$ref")
        place = _where(schema, keyword, lambda value: _is_end(value, url))
        return keyword, place, f"{url} is another document, and none is fetched"
    if unknown := re.match(r"Unknown format: (\S+)", reason):
        return "format", _where(schema, "format", lambda value: value == unknown[1]), reason
    if "schema is false" in reason and (found := _false(schema, schema, "#", 0)):
        keyword, at = found
        return keyword, f"at {at}", "that schema is false, which nothing fits"
    if "anyOf is empty" in reason and not any("anyOf" in one for one, _ in _schemas(schema)):
        reason = reason.replace("anyOf", "enum")
    said = reason.replace("patternProperty", "patternProperties")
    said = said.replace("min/maxProperties", "minProperties maxProperties")
    for keyword in _KEYWORD.findall(said):
        if keyword != "schema" and any(keyword in one for one, _ in _schemas(schema)):
            return keyword, _where(schema, keyword), reason
    return "", "", reason


def _schemas(schema: object, at: str = "#") -> Iterator[tuple[_Schema, str]]:
    """A schema and those within it, each with its JSON pointer; no names of properties, no values."""
    if not isinstance(schema, Mapping):
        return
    yield schema, at
    for key, value in schema.items():
        here = f"{at}/{_escaped(key)}"
        if key in _ONE or key in _ONE_TOO:
            yield from _schemas(value, here)
        elif key in _LIST and isinstance(value, list):
            for i, one in enumerate(value):
                yield from _schemas(one, f"{here}/{i}")
        elif key in _NAMED and isinstance(value, Mapping):
            for name, one in value.items():
                yield from _schemas(one, f"{here}/{_escaped(name)}")


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _where(
    schema: _Schema | None, keyword: str, fits: Callable[[object], bool] = lambda _: True
) -> str:
    """Where a keyword (with a value that fits) stands: as a JSON pointer to the schema that holds it."""
    places = [at for one, at in _schemas(schema) if keyword in one and fits(one[keyword])]
    if not places:
        return "in a schema that it refers to"
    return f"at {places[0]}" + (f", and {len(places) - 1} more" if len(places) > 1 else "")


def _names(schema: _Schema, keyword: str, url: str) -> bool:
    return any(_is_end(one.get(keyword), url) for one, _ in _schemas(schema))


def _is_end(value: object, url: str) -> bool:
    """Whether a reference leads to a document: it may be relative to an address above it."""
    path = value.partition("#")[0].lstrip("./") if isinstance(value, str) else ""
    return path != "" and url.partition("#")[0].endswith(path)


def _false(schema: object, root: _Schema, at: str, depth: int) -> tuple[str, str] | None:
    """The keyword that brings in a schema that is false, and where that schema stands."""
    if not isinstance(schema, Mapping) or depth > _MOST_STEPS:
        return None
    for keyword in _IN_PLACE:
        branches = schema.get(keyword)
        for i, one in enumerate(branches if isinstance(branches, list) else ()):
            here = f"{at}/{keyword}/{i}"
            if one is False:
                return keyword, here
            if found := _false(one, root, here, depth + 1):
                return found
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: object = root
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, Mapping) else None
        if target is False:
            return "$ref", reference
        return _false(target, root, reference, depth + 1)
    return None
