"""The page at /docs: what /openapi.json says, as HTML that a reader can search and copy from.

Pure: a description in, text out. It needs no script. Not for: serving it (reference.py).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Schema = Mapping[str, Any]

BASE = "BASE-ADDRESS"  # stands for the server's address, which each reader has from the own browser
_DEEPEST = 4  # fields of fields that are listed
_LIMITS = {  # word of JSON Schema -> how it is shown
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "≥ {} characters",
    "maxLength": "≤ {} characters",
    "minItems": "≥ {} items",
    "maxItems": "≤ {} items",
    "pattern": "like {}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a body or of an answer, or a part of a path."""

    name: str  # with those that it stands in: stream_options.include_usage, messages[].role
    kind: str
    limits: str
    text: str
    required: bool


def page_of(description: Schema, needs_key: Callable[[str], bool]) -> str:
    """The page.

    Args:
        description: an OpenAPI object, as FastAPI makes it.
        needs_key: whether a path asks for an API key.
    """
    info = description["info"]
    by_tag: dict[str, list[tuple[str, str, Schema]]] = {}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            tag = (operation.get("tags") or [""])[0]
            by_tag.setdefault(tag, []).append((path, method.upper(), operation))
    parts = description.get("components", {}).get("schemas", {})
    links = "".join(
        f'<li><a href="#{_id(path, method)}">{method} {escape(path)}</a></li>'
        for found in by_tag.values()
        for path, method, _ in found
    )
    sections = "".join(
        f"<section><h2>{escape(tag)}</h2>"
        + "".join(_operation(*one, parts=parts, key=needs_key(one[0])) for one in found)
        + "</section>"
        for tag, found in by_tag.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(info['title'])}: the interface</title>"
        '<link rel="icon" href="docs/icon.svg"><link rel="stylesheet" href="docs/style.css">'
        "</head><body>"
        f"<header><h1>{escape(info['title'])} {escape(info['version'])}</h1>"
        f"<p>{escape(info.get('summary', ''))}. The same for programs: "
        '<a href="openapi.json">openapi.json</a>.</p></header>'
        f'<nav aria-label="Paths"><ul>{links}</ul></nav><main>{sections}</main></body></html>\n'
    )


def _id(path: str, method: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in f"{method.lower()}{path}")


def _operation(path: str, method: str, operation: Schema, *, parts: Schema, key: bool) -> str:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    fields = [
        _field(one["name"], one["schema"], parts, required=bool(one.get("required")))
        for one in operation.get("parameters", ())
    ]
    fields += fields_of(content.get("schema", {}), parts)
    command = curl(path, method, content.get("example"), key=key)
    shown = [
        f'<article id="{_id(path, method)}">',
        f'<h3><span class="method">{method}</span> <code>{escape(path)}</code></h3>',
        f"<p>{escape(operation.get('description', ''))}</p>",
        f"<pre><code>{escape(command)}</code></pre>",
    ]
    if fields:
        shown.append(_folded(f"Fields of the request: {len(fields)}", fields))
    rows = []
    for status, answer in operation.get("responses", {}).items():
        rows.append(f"<li><b>{escape(status)}</b> {escape(answer['description'])}</li>")
        form = answer.get("content", {}).get("application/json", {}).get("schema", {})
        found = fields_of(form, parts) if status == "200" else []
        if found:
            shown.append(_folded(f"Fields of the answer: {len(found)}", found))
    return "".join([*shown, f"<ul>{''.join(rows)}</ul></article>"])


def _folded(title: str, fields: Sequence[Field]) -> str:
    rows = "".join(
        f"<tr><th scope=row><code>{escape(f.name)}</code>{' (needed)' * f.required}</th>"
        f"<td>{escape(f.kind)}</td><td>{escape(f.limits)}</td><td>{escape(f.text)}</td></tr>"
        for f in fields
    )
    heads = "".join(f"<th scope=col>{h}</th>" for h in ("field", "type", "limits", ""))
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<details><summary>{title}</summary><div class="wide">{table}</div></details>'


def curl(path: str, method: str, body: object, *, key: bool) -> str:
    """A command that asks for a path.

    Args:
        path: with names in braces, which stay for the reader to replace.
        method: HTTP's.
        body: sent as JSON; None: there is none.
        key: the path asks for one.
    """
    usual = "GET" if body is None else "POST"
    words = ["curl"] if method == usual else ["curl", "-X", method]
    for name in [part[1:-1] for part in path.split("/") if part.startswith("{")]:
        path = path.replace(f"{{{name}}}", name.upper())
    lines = [" ".join([*words, BASE + path])]
    if key:
        lines.append("-H 'Authorization: Bearer KEY'")
    if body is not None:
        lines.append("-H 'Content-Type: application/json'")
        lines.append(f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}")
    return " \\\n  ".join(lines)


def fields_of(
    schema: Schema, parts: Schema, *, prefix: str = "", depth: int = _DEEPEST
) -> list[Field]:
    """All fields of an object's schema, needed ones first, each followed by its own.

    Args:
        schema: JSON Schema; may refer to parts.
        parts: by name, as "#/components/schemas/NAME" refers to them.
        prefix: of the names.
        depth: how many levels are listed.
    """
    found = []
    for one in _forms(schema, parts):
        required = one.get("required", ())
        inners = one.get("properties", {}).items()
        for name, inner in sorted(inners, key=lambda item: item[0] not in required):
            found.append(_field(prefix + name, inner, parts, required=name in required))
            if depth > 1:
                found += fields_of(inner, parts, prefix=f"{prefix}{name}.", depth=depth - 1)
        if "items" in one and prefix:
            inner_prefix = f"{prefix[:-1]}[]."
            found += fields_of(one["items"], parts, prefix=inner_prefix, depth=depth)
    return found


def _field(name: str, schema: Schema, parts: Schema, *, required: bool) -> Field:
    forms = list(_forms(schema, parts))
    limits = [
        shown.format(_number(one[word]))
        for one in ({**schema, "anyOf": None}, *forms)
        for word, shown in _LIMITS.items()
        if word in one
    ]
    text = schema.get("description") or next(
        (one["description"] for one in forms if "description" in one), ""
    )
    return Field(
        name=name,
        kind=" or ".join(dict.fromkeys(_kind(one, parts) for one in forms)),
        limits=", ".join(dict.fromkeys(limits)),
        text=str(text),
        required=required,
    )


def _forms(schema: Schema, parts: Schema) -> Iterator[Schema]:
    """The alternatives that a value may be, null left out: an optional field may always be that."""
    if "$ref" in schema:
        yield from _forms(parts[schema["$ref"].rpartition("/")[2]], parts)
    elif "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from _forms(one, parts)
    elif schema.get("type") != "null":
        yield schema


def _kind(schema: Schema, parts: Schema) -> str:
    """A type in words."""
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        inner = dict.fromkeys(_kind(one, parts) for one in _forms(schema.get("items", {}), parts))
        return f"list of {' or '.join(inner)}"
    return kind


def _number(value: object) -> str:
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)
