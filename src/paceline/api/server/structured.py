"""Structured answers: `response_format` and `structured_outputs` of a request become one constraint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.api.server.errors import api_error, bad
from paceline.core.errors import PacelineError

if TYPE_CHECKING:
    from paceline.api.grammar import Whitespace
    from paceline.api.server.context import Compiler
    from paceline.api.server.protocol import ResponseFormat, StructuredOutputs
    from paceline.api.server.protocol_sampling import SamplingFields
    from paceline.core.request import Constraint

_NONE = "this server was started without structured output; leave {0} out"


def constraint_of(body: SamplingFields, compiler: Compiler | None) -> Constraint | None:
    """What the answer must be like; None: anything.

    Args:
        body: the request.
        compiler: makes constraints; None: the server has none.

    Raises:
        ApiError: 400; the constraint is malformed, unsupported, or given twice.
    """
    form, outputs = body.response_format, body.structured_outputs
    asked = [name for name, _ in _asked(outputs)] if outputs is not None else []
    by_form = form is not None and form.type != "text"
    if form is not None:
        schema_of(form)  # says what is wrong with it
    if len(asked) + by_form > 1:
        named = ["response_format"] * by_form + [f"structured_outputs.{name}" for name in asked]
        msg = f"{' and '.join(named)} constrain one answer; one of them is possible; choose one"
        raise bad(msg, named[-1])
    if form is None and outputs is None:
        return None
    param = "response_format" if by_form else f"structured_outputs.{(asked or [''])[0]}"
    if outputs is not None:
        _check_outputs(outputs, asked, by_form=by_form)
    elif not by_form:
        return None
    if compiler is None:
        raise bad(_NONE.format(param), param)
    try:
        whitespace = whitespace_of(body, compiler)
        if by_form:
            assert form is not None, "a form was asked for"
            return _of_form(form, compiler, whitespace)
        assert outputs is not None, "outputs were asked for"
        return _of_outputs(outputs, compiler, whitespace)
    except PacelineError as error:
        raise api_error(error, param=param) from error


def whitespace_of(body: SamplingFields, compiler: Compiler) -> Whitespace:
    """The white space of a JSON answer."""
    outputs = body.structured_outputs
    if outputs is None or outputs.disable_any_whitespace is None:
        return compiler.whitespace
    return "compact" if outputs.disable_any_whitespace else "flexible"


def _check_outputs(outputs: StructuredOutputs, asked: list[str], *, by_form: bool) -> None:
    """Refuse what says nothing, and a white space that nothing has."""
    spaced = outputs.disable_any_whitespace is not None
    if not asked and not (by_form and spaced):
        msg = (
            "structured_outputs says nothing; one of json, json_object, regex, choice and grammar is "
            "possible, and with a response_format disable_any_whitespace; give one, or leave it out"
        )
        raise bad(msg, "structured_outputs")
    if outputs.disable_any_whitespace and not by_form and not asked[0].startswith("json"):
        msg = (
            f"disable_any_whitespace is asked of a {asked[0]}, which says itself where white space is; it "
            "is possible with json, json_object and response_format; leave it out"
        )
        raise bad(msg, "structured_outputs.disable_any_whitespace")


def schema_of(form: ResponseFormat) -> dict[str, Any] | bool | None:
    """The schema of a `response_format`, wherever it stands; None: any object.

    Raises:
        ApiError: 400; it has two, or a type that has none.
    """
    schema, inner = form.schema_, None if form.json_schema is None else form.json_schema.schema_
    if inner is not None and (form.type != "json_schema" or schema not in (None, inner)):
        msg = (
            f"response_format of type {form.type} has json_schema.schema"
            f"{' and another schema' if form.type == 'json_schema' else ''}; one schema is possible, with "
            "the type json_schema; choose one, and that type"
        )
        raise bad(msg, "response_format.json_schema.schema")
    if schema is not None and form.type == "text":
        msg = (
            "response_format of type text has a schema; the types json_schema and json_object may have "
            "one; leave it out, or change the type"
        )
        raise bad(msg, "response_format.schema")
    return inner if schema is None else schema


def _of_form(form: ResponseFormat, compiler: Compiler, whitespace: Whitespace) -> Constraint:
    schema = schema_of(form)
    if form.type == "json_object" and not schema and schema is not False:
        return compiler.json_object(whitespace=whitespace)
    if schema is None:
        msg = (
            "response_format of type json_schema has no schema; json_schema.schema is possible; "
            "give one, or use the type json_object"
        )
        raise bad(msg, "response_format.json_schema.schema")
    return compiler.json_schema(schema, whitespace=whitespace)


def _of_outputs(
    outputs: StructuredOutputs, compiler: Compiler, whitespace: Whitespace
) -> Constraint:
    [(name, _)] = _asked(outputs)
    match name:
        case "json":
            return compiler.json_schema(outputs.json_, whitespace=whitespace)
        case "json_object":
            return compiler.json_object(whitespace=whitespace)
        case "regex":
            return compiler.regex(outputs.regex or "")
        case "choice":
            return compiler.choice(outputs.choice or [])
        case _:
            return compiler.lark(outputs.grammar or "")


def _asked(outputs: StructuredOutputs) -> list[tuple[str, object]]:
    """The forms that are given; `json_object: false` asks for nothing."""
    given = {
        "json": outputs.json_,
        "json_object": outputs.json_object or None,
        "regex": outputs.regex,
        "choice": outputs.choice,
        "grammar": outputs.grammar,
    }
    return [(name, value) for name, value in given.items() if value is not None]
