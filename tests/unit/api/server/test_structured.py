from __future__ import annotations

from typing import Any

import pytest

from paceline.api.grammar import Whitespace
from paceline.api.llm import LLM
from paceline.api.server import app
from paceline.api.server.service import Service
from paceline.api.server.settings import ServerSettings
from paceline.core.errors import RequestError
from tests.fake_engine import FakeEngine
from tests.served import TOKENIZER, completion_call, context, refusal


class Recorder:
    """A compiler that keeps what it was asked for."""

    def __init__(self, whitespace: Whitespace = "flexible") -> None:
        self.asked: list[tuple[str, object]] = []
        self.whitespace = whitespace
        self.layouts: list[Whitespace | None] = []

    def __getattr__(self, name: str) -> Any:
        def compile_it(*given: object, whitespace: Whitespace | None = None) -> object:
            self.asked.append((name, given[0] if given else None))
            self.layouts.append(whitespace)
            if given and given[0] == "bad":
                msg = "this pattern is bad"
                raise RequestError(msg)
            return self.asked[-1]

        return compile_it


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    "fields,asked",
    [
        ({"response_format": {"type": "json_object"}}, ("json_object", None)),
        ({"response_format": {"type": "json_object", "schema": {}}}, ("json_object", None)),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            ("json_schema", SCHEMA),
        ),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA, "name": "a"}},
            ("json_schema", SCHEMA),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "schema": SCHEMA,
                    "json_schema": {"schema": SCHEMA, "name": "a", "strict": False},
                }
            },
            ("json_schema", SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA, "strict": False}}, ("json_schema", SCHEMA)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            ("json_schema", SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA)),
        ({"structured_outputs": {"json": "{}"}}, ("json_schema", "{}")),
        ({"structured_outputs": {"json_object": True}}, ("json_object", None)),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, ("choice", ["a", "b"])),
        ({"structured_outputs": {"grammar": "start: X"}}, ("lark", "start: X")),
        ({"regex": "a+"}, ("regex", "a+")),
    ],
)
def test_every_form_is_compiled(fields, asked) -> None:
    """What is asked for reaches the job."""
    compiler = Recorder()
    call = completion_call(context(compiler=compiler), **fields)
    assert compiler.asked == [asked]
    assert call.job.constraint == asked


@pytest.mark.parametrize("default", ["flexible", "compact"])
@pytest.mark.parametrize("said,layout", [(None, None), (True, "compact"), (False, "flexible")])
@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json_object": True}},
    ],
)
def test_white_space_is_the_requests_or_else_the_servers(form, said, layout, default) -> None:
    """For each form of JSON."""
    compiler = Recorder(default)
    given = {**form.get("structured_outputs", {}), "disable_any_whitespace": said}
    if said is not None or "structured_outputs" in form:
        form = {**form, "structured_outputs": given}
    assert completion_call(context(compiler=compiler), **form).job.constraint is not None
    assert compiler.layouts == [layout or default]


@pytest.mark.parametrize("compact", [False, True])
def test_the_servers_default_reaches_the_compiler(compact) -> None:
    """`--disable-any-whitespace`, on a server as it is put together."""
    llm = LLM.from_engine(FakeEngine((5,)), TOKENIZER)
    try:
        found = app._context(Service(llm, ServerSettings(disable_any_whitespace=compact)))
    finally:
        llm.close()
    assert found.compiler is not None
    assert found.compiler.whitespace == ("compact" if compact else "flexible")


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}])
def test_text_is_no_constraint(fields) -> None:
    """Clients write it as the default."""
    compiler = Recorder()
    assert completion_call(context(compiler=compiler), **fields).job.constraint is None
    assert compiler.asked == []


@pytest.mark.parametrize(
    "fields,param",
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
        (
            {
                "response_format": {"type": "text"},
                "structured_outputs": {"disable_any_whitespace": False},
            },
            "structured_outputs",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {}},
            "structured_outputs",
        ),
        *(
            (
                {"structured_outputs": {kind: given, "disable_any_whitespace": True}},
                "structured_outputs.disable_any_whitespace",
            )
            for kind, given in (("regex", "a"), ("choice", ["a"]), ("grammar", "start: X"))
        ),
        ({"disable_any_whitespace": True}, "disable_any_whitespace"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        *(
            (
                {"response_format": {"type": kind, "json_schema": {"schema": SCHEMA}}},
                "response_format.json_schema.schema",
            )
            for kind in ("text", "json_object")
        ),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "schema": {},
                    "json_schema": {"schema": SCHEMA},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, "response_format.value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, "schema": {}}}},
            "response_format.json_schema.type",
        ),
        ({"structured_outputs": {"regex": "a", "backend": "x"}}, "structured_outputs.backend"),
        ({"structured_outputs": {"json": SCHEMA, "strict": True}}, "structured_outputs.strict"),
        ({"structured_outputs": {"regex": "bad"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "bad"}}, "structured_outputs.json"),
        (
            {"structured_outputs": {"whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(fields, param) -> None:
    """One constraint per answer; its own mistakes are told at its place."""
    error = refusal(completion_call, context(compiler=Recorder()), **fields)
    assert (error.status, error.param) == (400, param)


def test_a_server_without_grammars_says_so() -> None:
    """The extra package may be missing."""
    assert "without structured output" in refusal(completion_call, context(), regex="a").message
