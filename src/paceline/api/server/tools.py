"""Plans that know functions and reasoning: how a request's tools reach the model and how calls come back.

`planner_of` looks once at what is served and says how that model writes; a `ModelPlanner` then makes one
plan per request. Nothing here runs the engine or knows HTTP.
Not for: the families' forms (tool_parsers), grammars (tool_grammar.py, answer_rules.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from paceline.api.server.answer_rules import AnswerRules
from paceline.api.server.conversation import effort_variables, rendered
from paceline.api.server.families import (
    AUTO,
    choose_dialect,
    choose_thinking,
    shows_calls,
    shows_tools,
    template_of,
)
from paceline.api.server.reasoning import (
    AnswerParser,
    ThinkForm,
    Thinking,
    ThinkParser,
    count_reasoning,
)
from paceline.api.server.tool_parsers.dialects import Dialect, recognised
from paceline.api.server.tool_prompt import as_text, for_template, told_of
from paceline.api.server.tool_request import Mode, ToolUse, read_tools

if TYPE_CHECKING:
    from paceline.api.chat_template import Message
    from paceline.api.server.context import Compiler
    from paceline.api.server.protocol_chat import ChatRequest
    from paceline.api.tokenizer import Tokenizer
    from paceline.core.request import Constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """One request's plan (`plan.Plan`)."""

    messages: Sequence[Message]
    variables: Mapping[str, object]
    constraint: Constraint | None
    shows_special: bool
    use: ToolUse
    dialect: Dialect
    think: ThinkForm | None
    tokenizer: Tokenizer = field(repr=False)
    shows_reasoning: bool = True
    continued: str | None = None  # the assistant's message that answers go on with

    def parser(self, prompt: str) -> AnswerParser:
        """A fresh parser for an answer to a rendered prompt."""
        think = None if self.think is None else ThinkParser(self.think, self._thinking(prompt))
        names = frozenset(function.name for function in self.use.allowed)
        calls = None if self.use.mode is Mode.NONE else self.dialect.parser(names)
        return AnswerParser(think, calls, shows_reasoning=self.shows_reasoning)

    def reasoning_tokens(self, prompt: str, token_ids: Sequence[int]) -> int | None:
        """How many of an answer's tokens are reasoning; None: the model marks none."""
        if self.think is None:
            return None
        return count_reasoning(token_ids, self.tokenizer, self.think, self._thinking(prompt))

    def _thinking(self, prompt: str) -> Thinking:
        return _stands(self.think or ThinkForm(), prompt, self.continued)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlanner:
    """Makes plans for one model (`plan.Planner`).

    Attributes:
        dialect: how it writes calls.
        think: how it marks reasoning; None: it marks none.
        shows_tools: its template tells of functions.
        shows_calls: its template writes past calls and their results.
        text_arguments: it wants the arguments of past calls as JSON text.
    """

    tokenizer: Tokenizer = field(repr=False)
    dialect: Dialect
    think: ThinkForm | None
    shows_tools: bool
    shows_calls: bool
    text_arguments: bool

    def plan(self, body: ChatRequest, compiler: Compiler | None) -> ModelPlan:
        """The plan of a request.

        Raises:
            ApiError: 400; its tools or its format cannot be served.
        """
        use = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        tools = [function.tool for function in use.told]
        variables: dict[str, object] = {}
        if self.shows_calls:
            messages = for_template(body.messages, text_arguments=self.text_arguments)
        else:
            messages = as_text(body.messages, self.dialect)
        if not self.shows_tools:
            messages = told_of(tools, messages, self.dialect)
        elif tools:
            variables["tools"] = tools
        think = None
        if self.think is not None:
            ends = self.dialect.ends_reasoning if use.mode is not Mode.NONE else ()
            think = replace(self.think, also_ends=ends)

        continued = _continued(body)

        def thinking() -> Thinking:
            assert think is not None, "asked of a model that reasons"
            return _stands(think, self._prompt(body, messages, variables), continued)

        rules = AnswerRules(dialect=self.dialect, think=think, token_id=self._token_id)
        return ModelPlan(
            messages=messages,
            variables=variables,
            constraint=rules.constraint(body, use, compiler, thinking),
            shows_special=self._shows_special(use),
            use=use,
            dialect=self.dialect,
            think=think,
            tokenizer=self.tokenizer,
            shows_reasoning=body.include_reasoning is not False,
            continued=continued,
        )

    def _prompt(
        self, body: ChatRequest, messages: Sequence[Message], variables: Mapping[str, object]
    ) -> str:
        effort = effort_variables(body.reasoning_effort, self.tokenizer)
        return rendered(
            messages,
            self.tokenizer,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables={**variables, **effort},
            kwargs=body.chat_template_kwargs,
        )

    def _shows_special(self, use: ToolUse) -> bool:
        """Whether marks are special tokens, which a text leaves out unless it is told otherwise."""
        marks = self.dialect.marks if use.mode is not Mode.NONE else ()
        thinks = () if self.think is None else (self.think.opens, self.think.closes)
        return any(self._token_id(mark) is not None for mark in (*marks, *thinks))

    def _token_id(self, mark: str) -> int | None:
        token_id = self.tokenizer.backend.token_to_id(mark)
        return token_id if token_id in self.tokenizer.special_ids else None


def _stands(think: ThinkForm, prompt: str, continued: str | None) -> Thinking:
    """Where the reasoning stands when an answer begins."""
    return think.after(prompt) if continued is None else think.within(continued)


def _continued(body: ChatRequest) -> str | None:
    last = body.messages[-1]
    if not body.continue_final_message or last.get("role") != "assistant":
        return None
    content = last.get("content")
    return content if isinstance(content, str) else None


def planner_of(
    tokenizer: Tokenizer,
    *,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> ModelPlanner:
    """The planner of a model.

    Args:
        tokenizer: the model's, with its chat templates.
        tool_call_parser: a dialect's name; None or "auto": the one whose marks the template writes,
            Hermes' if it writes none that is known.
        reasoning_parser: one of `THINKERS`, or "none"; None or "auto": reasoning is looked for if the
            template or the vocabulary has its marks.

    Raises:
        ConfigError: an unknown name.
    """
    template = template_of(tokenizer)
    dialect = choose_dialect(template, tool_call_parser)
    # A template is trusted with functions only if they come back in a form that is known.
    known = recognised(template) is not None or tool_call_parser not in {None, AUTO}
    as_object, as_text = (known and shows_calls(tokenizer, text=text) for text in (False, True))
    return ModelPlanner(
        tokenizer=tokenizer,
        dialect=dialect,
        think=choose_thinking(tokenizer, reasoning_parser),
        shows_tools=known and shows_tools(tokenizer),
        shows_calls=as_object or as_text,
        text_arguments=as_text and not as_object,
    )
