"""Grammars for calls: right calls of every family are allowed, wrong ones are not, and text stays free."""

from __future__ import annotations

import functools

import pytest

from paceline.api.grammar import Constraints
from paceline.api.server.reasoning import ThinkForm, Thinking
from paceline.api.server.tool_grammar import (
    CallGrammar,
    Signature,
    choice_rule,
    grammar,
    json_rule,
    lark_rule,
    regex_rule,
)
from paceline.api.server.tool_parsers.dialects import (
    DIALECTS,
    HERMES,
    KIMI_K2,
    LLAMA3,
    Dialect,
)
from paceline.api.tokenizer import Tokenizer
from tests.byte_tokenizer import byte_tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/text"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"text": {"type": "string"}},
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = (Signature(name="get_weather", schema=CITY), Signature(name="get", schema=NOTHING))
PARIS = '{"city": "Paris {}", "days": 3}'


def calls(dialect: Dialect, *inner: tuple[str, str]) -> str:
    return dialect.write(inner)


@functools.cache
def tokenizer(*, special: bool) -> Tokenizer:
    marks = [mark for dialect in DIALECTS.values() for mark in dialect.marks]
    marks = [*dict.fromkeys(marks), "<think>", "</think>"]
    return byte_tokenizer(marks) if special else byte_tokenizer(plain=["<tool_call>", "</think>"])


def token_id(found: Tokenizer, mark: str) -> int | None:
    found_id = found.backend.token_to_id(mark)
    return found_id if found_id in found.special_ids else None


def rules(dialect: Dialect, *, special: bool, single: bool = False) -> CallGrammar:
    find = functools.partial(token_id, tokenizer(special=special))
    return CallGrammar(dialect=dialect, functions=FUNCTIONS, single=single, token_id=find)


class Allowed:
    """What a grammar allows."""

    def __init__(
        self,
        answer: str,
        *,
        special: bool,
        think: ThinkForm | None = None,
        thinking: Thinking = Thinking.CLOSED,
    ) -> None:
        self.tokenizer = tokenizer(special=special)
        find = functools.partial(token_id, self.tokenizer)
        text = grammar(answer, think, thinking, find)
        self.constraint = Constraints(self.tokenizer, self.tokenizer.vocab_size).lark(text)

    def prefix(self, text: str) -> tuple[str, bool]:
        """As much of a text as is allowed, and whether an answer may end there."""
        state = self.constraint.start()
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        taken = 0
        for each in ids:
            if not state.advance(each):
                break
            taken += 1
        ends = bytes(state.mask())[0] >> 2 & 1
        return self.tokenizer.decode(ids[:taken], skip_special_tokens=False), bool(ends)

    def takes(self, text: str) -> bool:
        return self.prefix(text) == (text, True)


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
class TestDialects:
    """Every family, with marks that are tokens of their own and marks that are plain text."""

    def test_a_forced_answer_is_right_calls(self, dialect: Dialect, special: bool) -> None:
        """One call or several, of known functions, with arguments of their schemas; nothing else."""
        allowed = Allowed(rules(dialect, special=special).forced(), special=special)
        one = calls(dialect, ("get_weather", PARIS))
        assert allowed.takes(one)
        assert allowed.takes(calls(dialect, ("get", "{}")))
        assert allowed.takes(calls(dialect, ("get_weather", PARIS), ("get", "{}")))
        assert not allowed.takes("")
        assert allowed.prefix("So: " + one) == ("", False)
        assert not allowed.takes(calls(dialect, ("get_wether", PARIS)))
        assert not allowed.takes(calls(dialect, ("get_weather", '{"city": 3}')))
        assert not allowed.takes(calls(dialect, ("get", '{"city": "Paris"}')))

    def test_a_single_call_stays_single(self, dialect: Dialect, special: bool) -> None:
        """`parallel_tool_calls: false`: one call, then the end."""
        forced = Allowed(rules(dialect, special=special, single=True).forced(), special=special)
        lazy = Allowed(rules(dialect, special=special, single=True).lazy(), special=special)
        one, two = (calls(dialect, *[("get", "{}")] * n) for n in (1, 2))
        for allowed in (forced, lazy):
            assert allowed.takes(one)
            assert not allowed.takes(two)
        assert lazy.takes("No call.")

    def test_a_lazy_answer_is_free_until_a_call_begins(
        self, dialect: Dialect, special: bool
    ) -> None:
        """Text is as it likes; what begins as a call goes on as a right one."""
        allowed = Allowed(rules(dialect, special=special).lazy(), special=special)
        assert allowed.takes("")
        assert allowed.takes("It rains 🙂, <b>and</b> so on: }{")
        right = calls(dialect, ("get_weather", PARIS))
        assert allowed.takes(right)
        wrong = right.replace('"city": "Paris {}"', '"town": "Paris"')
        assert not allowed.takes(wrong)
        if dialect is not LLAMA3:  # there a call is the whole answer
            assert allowed.takes("I look. " + right)
            assert not allowed.takes("I look. " + wrong)
            assert not allowed.takes(dialect.trigger + " no call")


def test_after_a_call_text_may_go_on() -> None:
    """Hermes' calls stand amid text, each with its own mark."""
    allowed = Allowed(rules(HERMES, special=False).lazy(), special=False)
    one = calls(HERMES, ("get", "{}"))
    assert allowed.takes(f"First {one} and then {one} done")
    assert not allowed.takes(f"First {one} and then <tool_call>x")


def test_a_mark_is_its_token_and_never_its_letters() -> None:
    """A model that spells a special token out in letters is not understood by its own template."""
    found = tokenizer(special=True)
    allowed = Allowed(rules(KIMI_K2, special=True).forced(), special=True)
    mask = bytes(allowed.constraint.start().mask())
    first = [i for i in range(found.vocab_size) if mask[i >> 3] >> (i & 7) & 1]
    assert first == [found.backend.token_to_id(KIMI_K2.trigger)]


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
def test_reasoning_may_come_first(special: bool) -> None:
    """As much as the model likes; the constraint holds from its end on."""
    answer = rules(HERMES, special=special).forced()
    one = calls(HERMES, ("get", "{}"))
    form = ThinkForm()
    opened = Allowed(answer, special=special, think=form, thinking=Thinking.OPEN)
    assert opened.takes(f"Let me {{see}}.\n</think>\n\n{one}")
    assert opened.takes(f"</think>{one}")
    assert not opened.takes(one)
    assert not opened.takes("Let me see </think> So:")
    maybe = Allowed(answer, special=special, think=form, thinking=Thinking.MAYBE)
    assert maybe.takes(one)
    assert maybe.takes(f"<think>\nLet me see.\n</think>\n\n{one}")
    assert not maybe.takes(f"Let me see.</think>{one}")
    closed = Allowed(answer, special=special, think=form, thinking=Thinking.CLOSED)
    assert closed.takes(one)
    assert not closed.takes(f"<think></think>{one}")


@pytest.mark.parametrize(
    "form,right,wrong",
    [
        (json_rule({"type": "object", "required": ["a"]}, "flexible"), '{ "a" :\n1}', "[]"),
        (json_rule(True, "flexible"), "[1]", "x"),
        (choice_rule(["yes", 'n"o', "ja\n"]), 'n"o', "maybe"),
        (regex_rule(r"a/b\/c\\[0-9]{2}"), "a/b/c\\12", "a/b/c12"),
        (regex_rule("x\ny"), "x\ny", "xy"),
        (lark_rule('start: "x" sub\nsub: /[}{]+/'), "x}{}", "x"),
    ],
    ids=["json", "any json", "choice", "regex", "newline", "grammar"],
)
def test_every_format_can_follow_reasoning_or_give_way_to_calls(
    form: str, right: str, wrong: str
) -> None:
    """A structured answer within a larger grammar is the same answer."""
    thought = Allowed(f"answer: {form}", special=False, think=ThinkForm(), thinking=Thinking.OPEN)
    assert thought.takes(f"Hm.</think>\n{right}")
    assert not thought.takes(f"Hm.</think>\n{wrong}")
    for dialect in DIALECTS.values():
        either = Allowed(rules(dialect, special=True).either(form), special=True)
        assert either.takes(right)
        mark = "" if dialect.trigger else dialect.marks[0]
        assert either.takes(mark + calls(dialect, ("get", "{}")))
        assert not either.takes(wrong)
        assert not either.takes("so")


def test_a_structured_answer_may_begin_as_a_call_does() -> None:
    """Llama 3 writes calls as bare JSON; beside a format they have their tag, so both stay possible."""
    form = json_rule({"type": "object"}, "flexible")
    one = calls(LLAMA3, ("get", "{}"))
    for special in (True, False):
        either = Allowed(rules(LLAMA3, special=special).either(form), special=special)
        for text in ('{"a": 1}', '{"name": "Ada"}', '{"name":1}', one, LLAMA3.marks[0] + one):
            assert either.takes(text), either.prefix(text)
        assert not either.takes(LLAMA3.marks[0] + '{"name": "Ada"}')


@pytest.mark.parametrize("thinking", [Thinking.OPEN, Thinking.MAYBE])
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_reasoning_may_talk_about_calls(dialect: Dialect, thinking: Thinking) -> None:
    """What begins as reasoning is no text in which calls would count; after it they do."""
    lazy = rules(dialect, special=False).lazy()
    allowed = Allowed(lazy, special=False, think=ThinkForm(), thinking=thinking)
    begin = "" if thinking is Thinking.OPEN else "\n<think>"
    right = calls(dialect, ("get", "{}"))
    assert allowed.takes(f"{begin}Hm {dialect.trigger} hm</think>\nIt rains.")
    assert allowed.takes(f"{begin}Hm</think>\n{right}")
    assert not allowed.takes(f"{begin}Hm</think>\n{right.replace('get', 'got')}")
    if thinking is Thinking.MAYBE:
        assert allowed.takes("It rains.")
        assert allowed.takes("<thin")
        assert allowed.takes(right)
        assert not allowed.takes(right.replace("get", "got"))
