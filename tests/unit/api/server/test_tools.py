"""Plans: what a model is told of functions, what its answers must be like, and what is made of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.api.grammar import Constraints
from paceline.api.server.families import THINKERS, check_parsers
from paceline.api.server.pieces import CallArguments, CallStart, Content, Reasoning
from paceline.api.server.protocol_chat import ChatRequest
from paceline.api.server.reasoning import Thinking
from paceline.api.server.tool_parsers import deepseek, kimi_k2
from paceline.api.server.tool_parsers.dialects import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DIALECTS,
    HERMES,
    KIMI_K2,
    LLAMA3,
    recognised,
)
from paceline.api.server.tools import ModelPlan, ModelPlanner, planner_of
from paceline.api.tokenizer import Tokenizer
from paceline.core.errors import ConfigError
from tests.byte_tokenizer import CHATML, byte_tokenizer
from tests.served import refusal

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "functions.get_weather:0",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "K\\"ln"}'},
}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "12°"},
]

# The ways in which the families' templates write functions and calls, in short.
_EACH = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
_REST = "{{ m['content'] }}<|im_end|>\n{% endfor %}"
_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWEN = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>"
    '<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    + _EACH
    + '{% for c in m.tool_calls or [] %}<tool_call>\n{{ \'{"name": "\' + c.function.name + \'", '
    '"arguments": \' }}{{ c.function.arguments | tojson }}{{ "}" }}\n</tool_call>{% endfor %}'
    "{% if m.content is string %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    + _END
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
KIMI = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    + _EACH
    + "{% if m.get('tool_calls') %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c['id'] }}<|tool_call_argument_begin|>"
    "{% if c['function']['arguments'] is string %}{{ c['function']['arguments'] }}"
    "{% else %}{{ c['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>"
    "{% endfor %}<|tool_calls_section_end|>{% endif %}" + _REST + _END
)
DEEPSEEK = (
    _EACH + "{% if m['content'] is none %}" + deepseek.OPEN + "{% for c in m['tool_calls'] %}"
    f"{deepseek.CALL_OPEN}{{{{ c['type'] + '{deepseek.SEPARATOR}' + c['function']['name'] + "
    f"'\\n```json\\n' + c['function']['arguments'] + '\\n```' }}}}{deepseek.CALL_CLOSE}"
    f"{{% endfor %}}{deepseek.CLOSE}<|im_end|>{{% else %}}{{{{ m['content'] }}}}<|im_end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
)
LLAMA = (
    "{% if tools %}<|start_header_id|>Respond in the format "
    '{"name": function name, "parameters": {}}{% for t in tools %}{{ t | tojson }}{% endfor %}'
    "{% endif %}" + _EACH + "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}"
    '{{ \'{"name": "\' + c.function.name + \'", "parameters": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}' }}{% endfor %}{% else %}{{ m['content'] }}"
    "{% endif %}{% endfor %}" + _END
)
K2_MARKS = KIMI_K2.marks


def plan(planner: ModelPlanner, **fields: Any) -> ModelPlan:
    body = ChatRequest.model_validate({"messages": CHAT[:1], **fields})
    return planner.plan(body, Constraints(planner.tokenizer, planner.tokenizer.vocab_size))


def prompt(planner: ModelPlanner, found: ModelPlan, **kwargs: Any) -> str:
    return planner.tokenizer.chat_text(found.messages, **{**found.variables, **kwargs})


@pytest.mark.parametrize(
    "template,dialect,tools,calls,text",
    [
        (CHATML, HERMES, False, False, False),
        (QWEN, HERMES, True, True, False),
        (KIMI, KIMI_K2, True, True, False),
        (DEEPSEEK, DEEPSEEK_V3, False, True, True),
        (DEEPSEEK.replace("```json", ""), DEEPSEEK_V31, False, True, True),
        (LLAMA, LLAMA3, True, True, False),
        (QWEN.replace("<tool_call>", "[TOOL_CALLS]"), HERMES, False, False, False),
    ],
    ids=["plain", "qwen", "kimi", "deepseek-v3", "deepseek-v31", "llama", "unknown marks"],
)
def test_the_template_says_how_a_model_writes(
    template: str, dialect: object, tools: bool, calls: bool, text: bool
) -> None:
    """The family is seen from the template; one whose marks are not known gets Hermes' form."""
    planner = planner_of(byte_tokenizer(template=template))
    assert planner.dialect is dialect
    assert planner.shows_tools is tools
    assert planner.shows_calls is calls
    assert planner.text_arguments is text


def test_flags_choose_instead_of_the_template() -> None:
    """A flag's word counts; a wrong one is answered with what there is."""
    tokenizer = byte_tokenizer(template=QWEN)
    for name, dialect in DIALECTS.items():
        planner = planner_of(tokenizer, tool_call_parser=name, reasoning_parser="none")
        assert (planner.dialect, planner.think) == (dialect, None)
        assert planner.shows_tools
    assert planner_of(tokenizer, tool_call_parser="auto").dialect is HERMES
    with pytest.raises(ConfigError, match=r"hermes, llama3_json"):
        planner_of(tokenizer, tool_call_parser="x")
    with pytest.raises(ConfigError, match="qwen3"):
        planner_of(tokenizer, reasoning_parser="x")
    for names in (("x", None), (None, "x")):  # before a model is loaded
        with pytest.raises(ConfigError, match="'x' is not known"):
            check_parsers(*names)
    check_parsers("auto", "none")


def test_reasoning_is_seen_from_template_or_vocabulary() -> None:
    """Where neither has the marks, an answer's text is left alone."""
    assert planner_of(byte_tokenizer(template=QWEN)).think is not None
    assert planner_of(byte_tokenizer(plain=["</think>"])).think is not None
    assert planner_of(byte_tokenizer()).think is None
    assert planner_of(byte_tokenizer(template=None)).dialect is HERMES
    for name in THINKERS:
        assert planner_of(byte_tokenizer(), reasoning_parser=name).think is not None


@pytest.mark.parametrize(
    "template,shown",
    [
        (
            CHATML,
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "K\\"ln"}}\n</tool_call>',
        ),
        (
            QWEN,
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "K\\"ln"}}\n</tool_call>',
        ),
        (
            KIMI,
            KIMI_K2.write([("get_weather", '{"city": "K\\"ln"}')]),
        ),
        (LLAMA, '{"name": "get_weather", "parameters": {"city": "K\\"ln"}}'),
    ],
    ids=["plain", "qwen", "kimi", "llama"],
)
def test_functions_and_past_calls_reach_the_prompt(template: str, shown: str) -> None:
    """The model sees its functions, and its own calls as it would write them."""
    planner = planner_of(byte_tokenizer(template=template))
    text = prompt(planner, plan(planner, messages=CHAT, tools=[WEATHER]))
    assert shown in text
    assert '"name": "get_weather", "parameters"' in text
    without = prompt(planner, plan(planner, messages=CHAT, tools=[WEATHER], tool_choice="none"))
    assert shown in without  # the history stays
    assert '"name": "get_weather", "parameters": {"type"' not in without


def test_a_template_that_tests_content_for_none_gets_none() -> None:
    """DeepSeek's first templates know a message of calls by its content of None."""
    planner = planner_of(byte_tokenizer(template=DEEPSEEK))
    found = planner.plan(ChatRequest.model_validate({"messages": CHAT[:2]}), None)
    call = (
        f"{deepseek.OPEN}{deepseek.CALL_OPEN}function{deepseek.SEPARATOR}get_weather\n```json\n"
        f'{{"city": "K\\"ln"}}\n```{deepseek.CALL_CLOSE}{deepseek.CLOSE}'
    )
    assert call in prompt(planner, found)
    told = plan(planner, tools=[WEATHER])
    assert told.messages[0]["role"] == "system"  # this template does not tell of functions itself
    assert deepseek.CALL_OPEN in str(told.messages[0]["content"])


def test_special_marks_are_part_of_the_text() -> None:
    """Marks that are special tokens would be missing from the text that is parsed."""
    planner = planner_of(byte_tokenizer(K2_MARKS, template=KIMI))
    assert plan(planner, tools=[WEATHER]).shows_special
    assert not plan(planner).shows_special
    assert not plan(planner_of(byte_tokenizer(template=KIMI)), tools=[WEATHER]).shows_special
    assert plan(planner_of(byte_tokenizer(["</think>"]))).shows_special


def test_answers_become_reasoning_content_and_calls() -> None:
    """One parser does all of it; without functions a call's text is text."""
    planner = planner_of(byte_tokenizer(template=QWEN))
    text = '<think>Hm</think>So <tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    found = plan(planner, tools=[WEATHER])
    whole = found.parser("assistant\n").whole(text)
    assert whole[:2] == [Reasoning("Hm"), Content("So")]
    assert isinstance(whole[2], CallStart)
    assert whole[3] == CallArguments(0, "{}")
    assert plan(planner).parser("assistant\n").whole(text) == [
        Reasoning("Hm"),
        Content(text.partition("</think>")[2]),
    ]
    hidden = plan(planner, include_reasoning=False).parser("assistant\n")
    assert hidden.whole("<think>Hm</think>So") == [Content("So")]
    ids = planner.tokenizer.encode("<think>Hm</think>So")
    assert found.reasoning_tokens("assistant\n", ids) == 2
    assert (
        planner_of(byte_tokenizer())
        .plan(ChatRequest.model_validate({"messages": CHAT[:1]}), None)
        .reasoning_tokens("", ids)
        is None
    )


class TestConstraints:
    """When answers are constrained, and by what."""

    def setup_method(self) -> None:
        self.planner = planner_of(byte_tokenizer(plain=["<tool_call>"], template=QWEN))

    def allowed(self, found: ModelPlan, text: str, tokenizer: Tokenizer | None = None) -> bool:
        assert found.constraint is not None
        state = found.constraint.start()
        ids = (tokenizer or self.planner.tokenizer).encode(text, add_special_tokens=False)
        return all(state.advance(each) for each in [*ids, 2])

    def test_free_answers_stay_free(self) -> None:
        """Without a need there is no constraint, which costs time at every step."""
        assert plan(self.planner).constraint is None
        assert plan(self.planner, tools=[WEATHER]).constraint is None
        assert plan(self.planner, tools=[WEATHER], tool_choice="none").constraint is None

    def test_required_and_named_calls_are_forced(self) -> None:
        """Reasoning may come first, unless the template has closed it."""
        call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a"}}\n</tool_call>'
        named = {"type": "function", "function": {"name": "get_weather"}}
        for choice in ("required", named):
            found = plan(self.planner, tools=[WEATHER], tool_choice=choice)
            assert self.allowed(found, call)
            assert self.allowed(found, f"<think>Hm</think>\n{call}")
            assert not self.allowed(found, "No.")
            closed = plan(
                self.planner,
                tools=[WEATHER],
                tool_choice=choice,
                chat_template_kwargs={"enable_thinking": False},
            )
            assert self.allowed(closed, call)
            assert not self.allowed(closed, f"<think>Hm</think>\n{call}")

    def test_strict_functions_are_checked_where_the_model_is_free(self) -> None:
        """Text is free, and a call of a strict function follows its schema."""
        strict = json.loads(json.dumps(WEATHER))
        strict["function"]["strict"] = True
        found = plan(self.planner, tools=[strict])
        assert self.allowed(found, "It rains.")
        right = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a"}}\n</tool_call>'
        assert self.allowed(found, f"I look. {right}")
        assert not self.allowed(found, right.replace('"a"', "3"))

    def test_a_format_comes_after_reasoning_or_gives_way_to_calls(self) -> None:
        """`response_format` with reasoning, and with functions that may be called instead."""
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}
        found = plan(self.planner, response_format=form)
        assert self.allowed(found, "<think>Hm</think>\n[1]")
        assert self.allowed(found, "[1]")
        assert not self.allowed(found, "{}")
        both = plan(self.planner, response_format=form, tools=[WEATHER])
        assert self.allowed(both, "[1]")
        assert self.allowed(
            both, '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
        )
        assert not self.allowed(both, "So")
        number = {"type": "object", "properties": {"a": {"type": "number"}}}
        other = plan(self.planner, response_format={"type": "json_object", "schema": number})
        assert self.allowed(other, '<think>Hm</think>\n{"a": 1}')
        assert not self.allowed(other, '<think>Hm</think>\n{"a": "b"}')
        texts = plan(self.planner, structured_outputs={"json": '{"type": "array"}'})
        assert self.allowed(texts, "<think></think>[1]")

    @pytest.mark.parametrize(
        "outputs,right",
        [
            ({"choice": ["yes", "no"]}, "no"),
            ({"regex": "[a-c]+/"}, "abc/"),
            ({"grammar": 'start: "x"+'}, "xx"),
            ({"json_object": True}, '{"a": 1}'),
        ],
    )
    def test_every_structured_output_comes_after_reasoning(
        self, outputs: dict[str, Any], right: str
    ) -> None:
        """Not only JSON."""
        found = plan(self.planner, structured_outputs=outputs)
        assert self.allowed(found, f"<think>Hm</think>{right}")
        assert self.allowed(found, right)
        assert not self.allowed(found, f"<think>Hm</think>{right}?")

    def test_what_excludes_one_another_is_refused(self) -> None:
        """Forced calls and a format for the text cannot both be."""
        error = refusal(
            plan,
            self.planner,
            tools=[WEATHER],
            tool_choice="required",
            response_format={"type": "json_object"},
        )
        assert (error.status, error.param) == (400, "tool_choice")

    def test_a_schema_that_is_not_served_names_its_function(self) -> None:
        """The keyword and the function, among several."""
        bad = {
            "type": "function",
            "function": {
                "name": "odd",
                "parameters": {"type": "object", "properties": {"a": {"not": {}, "x": 1}}},
            },
        }
        bad["function"]["parameters"] = {"type": "object", "contains": {}, "if": {"type": "object"}}  # type: ignore[index]
        error = refusal(plan, self.planner, tools=[WEATHER, bad], tool_choice="required")
        assert (error.status, error.param) == (400, "tools.1.function.parameters")
        assert "if" in error.message

    def test_without_structured_output_calls_cannot_be_forced(self) -> None:
        """The server says so instead of ignoring it."""
        body = ChatRequest.model_validate(
            {"messages": CHAT[:1], "tools": [WEATHER], "tool_choice": "required"}
        )
        assert refusal(self.planner.plan, body, None).param == "tool_choice"

    def test_where_the_prompt_opened_reasoning_the_constraint_begins_within(self) -> None:
        """DeepSeek-R1's prompt ends with the opening mark."""
        planner = planner_of(byte_tokenizer(template=DEEPSEEK))
        assert planner.think is not None
        found = plan(planner, response_format={"type": "json_object"})
        assert planner.think.after(prompt(planner, found)) is Thinking.OPEN
        assert self.allowed(found, "Hm</think>{}", planner.tokenizer)
        assert not self.allowed(found, "{}", planner.tokenizer)


@pytest.mark.parametrize(
    "message,answer,pieces",
    [
        ("<think>Two and", " two.</think>Four.", [Reasoning("two."), Content("Four.")]),
        ("<think>Hm</think>Fo", "ur. <think>", [Content("ur. <think>")]),
        ("Fo", "<think>ur", [Content("<think>ur")]),
        ("", "<think>Hm</think>Four", [Reasoning("Hm"), Content("Four")]),
    ],
)
def test_a_message_that_is_continued_says_where_its_reasoning_stands(
    message: str, answer: str, pieces: list[Any]
) -> None:
    """The rendered prompt ends within it, so its end says nothing."""
    planner = planner_of(byte_tokenizer(plain=["</think>"]))
    messages = [*CHAT[:1], {"role": "assistant", "content": message}]
    found = plan(planner, messages=messages, continue_final_message=True)
    assert found.parser(f"assistant\n{message}").whole(answer) == pieces


def test_kimi_calls_end_reasoning_that_was_not_closed() -> None:
    """Its marks are tokens of their own, no talk about them."""
    planner = planner_of(byte_tokenizer(K2_MARKS, plain=["</think>"], template=KIMI))
    found = plan(planner, tools=[WEATHER])
    call = f"{kimi_k2.OPEN}{kimi_k2.CALL_OPEN}functions.a:0{kimi_k2.SEPARATOR}{{}}"
    whole = found.parser("").whole(f"<think>Hm {call}{kimi_k2.CALL_CLOSE}{kimi_k2.CLOSE}")
    assert whole[0] == Reasoning("Hm")
    assert whole[1:] == [CallStart(0, "functions.a:0", "a"), CallArguments(0, "{}")]


def test_templates_of_other_families_are_not_taken_for_known_ones() -> None:
    """Qwen3-Coder writes XML between Hermes' marks."""
    assert recognised("<tool_call>\n<function=x>") is None
    assert recognised("") is None
