from __future__ import annotations

from typing import Any

import pytest

from paceline.core.errors import RequestError
from tests.served import completion_call, context, refusal


class Recorder:
    """A compiler that keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []

    def __getattr__(self, name: str) -> Any:
        def compile_it(*given: object) -> object:
            self.asked.append((name, given[0] if given else None))
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
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
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
