"""What an answer must be like where reasoning or calls of functions stand around it: one constraint.

A structured answer begins after the reasoning, and calls take its place where the model may choose. Both
are said in one grammar, made of the request's own parts.
Not for: an answer that is structured as a whole (structured.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.api.server.errors import api_error, bad
from paceline.api.server.reasoning import ThinkForm, Thinking
from paceline.api.server.structured import constraint_of, schema_of, whitespace_of
from paceline.api.server.tool_grammar import (
    CallGrammar,
    Signature,
    choice_rule,
    grammar,
    json_rule,
    lark_rule,
    regex_rule,
)
from paceline.api.server.tool_request import Mode, ToolUse
from paceline.core.errors import RequestError

if TYPE_CHECKING:
    from paceline.api.grammar import Whitespace
    from paceline.api.server.context import Compiler
    from paceline.api.server.protocol_sampling import SamplingFields
    from paceline.api.server.tool_parsers.dialects import Dialect
    from paceline.core.request import Constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """Makes constraints of whole answers.

    Args:
        dialect: how the model writes calls.
        think: how it writes reasoning; None: it does not.
        token_id: id of a special token by its text; None: it is no token of its own.
    """

    dialect: Dialect
    think: ThinkForm | None
    token_id: Callable[[str], int | None]

    def constraint(
        self,
        body: SamplingFields,
        use: ToolUse,
        compiler: Compiler | None,
        thinking: Callable[[], Thinking],
    ) -> Constraint | None:
        """The constraint of a request's answers; None: anything.

        Args:
            body: the request, with what it says of structured answers.
            use: what it says of functions.
            compiler: None: the server has none.
            thinking: where the reasoning stands when an answer begins; asked only if that matters.

        Raises:
            ApiError: 400; a schema or format is not served, or two exclude one another.
        """
        form = constraint_of(body, compiler)  # says what is wrong with it
        if form is not None and use.mode is Mode.REQUIRED:
            msg = (
                "the answer must be calls (tool_choice) and must have a format (response_format or "
                "structured_outputs); one of them is possible; choose one"
            )
            raise bad(msg, "tool_choice")
        calls = use.mode is Mode.REQUIRED or use.is_lazy or (form is not None and bool(use.allowed))
        if not calls and form is None:
            return None
        if compiler is None:
            msg = (
                "tool_choice, strict functions and parallel_tool_calls false need structured output, "
                'and this server was started without; tool_choice "auto" is possible; ask for that'
            )
            raise bad(msg, "tool_choice")
        stands = Thinking.CLOSED if self.think is None else thinking()
        if not calls and stands is Thinking.CLOSED:
            return form
        symbols = "" if form is None else _form_rule(body, whitespace_of(body, compiler))
        rules = self._calls(use, symbols) if calls else f"answer: {symbols}"
        try:
            return compiler.lark(grammar(rules, self.think, stands, self.token_id))
        except RequestError as error:
            _blame(use, compiler)
            raise api_error(error, param="tools" if calls else "response_format") from error

    def _calls(self, use: ToolUse, form: str) -> str:
        written = CallGrammar(
            dialect=self.dialect,
            functions=[Signature(name=f.name, schema=f.schema) for f in use.allowed],
            single=use.single,
            token_id=self.token_id,
        )
        if form:
            return written.either(form)
        return written.forced() if use.mode is Mode.REQUIRED else written.lazy()


def _form_rule(body: SamplingFields, whitespace: Whitespace) -> str:
    """Symbols for the structured answer that `constraint_of` compiled."""
    form, outputs = body.response_format, body.structured_outputs
    if form is not None and form.type != "text":
        schema = schema_of(form)
        if schema is None or (form.type == "json_object" and not schema):
            schema = {"type": "object"}
        return json_rule(schema, whitespace)
    assert outputs is not None, "there is a structured answer"
    if outputs.json_ is not None:
        given = outputs.json_
        schema = json.loads(given) if isinstance(given, str) else given
        return json_rule(schema, whitespace)
    if outputs.regex is not None:
        return regex_rule(outputs.regex)
    if outputs.choice is not None:
        return choice_rule(outputs.choice)
    if outputs.grammar is not None:
        return lark_rule(outputs.grammar)
    return json_rule({"type": "object"}, whitespace)


def _blame(use: ToolUse, compiler: Compiler) -> None:
    """Name the function whose schema is at fault, where one is."""
    for index, function in enumerate(use.told):
        if function not in use.allowed:
            continue
        try:
            compiler.json_schema(function.schema, whitespace="spaced")
        except RequestError as error:
            raise api_error(error, param=f"tools.{index}.function.parameters") from error
