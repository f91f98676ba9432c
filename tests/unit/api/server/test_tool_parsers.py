"""Recorded answers of every family: the same pieces however the text is cut, and nothing lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.api.server.pieces import CallArguments, CallStart, Content, Piece, merged
from paceline.api.server.tool_parsers import deepseek, hermes, kimi_k2, llama3
from paceline.api.server.tool_parsers.base import CallParser
from paceline.api.server.tool_parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from paceline.api.server.tool_parsers.hermes import HermesParser
from paceline.api.server.tool_parsers.kimi_k2 import KimiK2Parser
from paceline.api.server.tool_parsers.llama3 import Llama3Parser

NAMES = frozenset({"get_weather", "add", "now"})
PARSERS: dict[str, type[CallParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "kimi": KimiK2Parser,
    "v3": DeepSeekV3Parser,
    "v31": DeepSeekV31Parser,
}


def ids() -> Callable[[], str]:
    count = itertools.count()
    return lambda: f"call_{next(count)}"


def parse(kind: str, parts: Iterable[str]) -> list[Piece]:
    parser = PARSERS[kind](NAMES, ids())
    pieces: list[Piece] = []
    for part in parts:
        pieces += parser.feed(part)
    return merged([*pieces, *parser.finish()])


def k2(*calls: tuple[str, str], close: bool = True) -> str:
    inner = "".join(
        kimi_k2.CALL_OPEN + head + kimi_k2.SEPARATOR + args + kimi_k2.CALL_CLOSE
        for head, args in calls
    )
    return kimi_k2.OPEN + inner + (kimi_k2.CLOSE if close else "")


def v3(*calls: tuple[str, str]) -> str:
    inner = "\n".join(
        f"{deepseek.CALL_OPEN}function{deepseek.SEPARATOR}{name}\n```json\n{args}\n```"
        f"{deepseek.CALL_CLOSE}"
        for name, args in calls
    )
    return deepseek.OPEN + inner + deepseek.CLOSE


def v31(*calls: tuple[str, str]) -> str:
    inner = "".join(
        deepseek.CALL_OPEN + name + deepseek.SEPARATOR + args + deepseek.CALL_CLOSE
        for name, args in calls
    )
    return deepseek.OPEN + inner + deepseek.CLOSE


@dataclass(frozen=True)
class Recorded:
    kind: str
    text: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()


PARIS = (
    '{"city": "Paris \\"\\u00e9t\\u00e9\\"", "days": [1, {"a": null}], "日本": "🙂 </tool_call>"}'
)
CASES = {
    "hermes-one": Recorded(
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
        "",
        (("get_weather", PARIS),),
    ),
    "hermes-text-and-two": Recorded(
        "hermes",
        'Let me look. 🙂\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'
        '</tool_call>\n<tool_call>{"arguments": {"x": {}}, "name": "now"}</tool_call> Done < here.\n',
        "Let me look. 🙂Done < here.\n",
        (("add", '{"a": 1, "b": 2}'), ("now", '{"x": {}}')),
    ),
    "hermes-not-closed": Recorded(
        "hermes",
        '<tool_call>\n{"name": "now", "arguments": {}}',
        "",
        (("now", "{}"),),
    ),
    "hermes-no-arguments": Recorded(
        "hermes", '<tool_call>{"name": "now"}</tool_call>', "", (("now", "{}"),)
    ),
    "hermes-null-and-more-keys": Recorded(
        "hermes",
        '<tool_call>{"id": 7, "type": "function", "name": "now", "arguments": null, "n": [1]}'
        "</tool_call>",
        "",
        (("now", "{}"),),
    ),
    "hermes-arguments-as-a-string": Recorded(
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\ud83d\\ude42\\"}"}</tool_call>',
        "",
        (("add", '{"a": "🙂"}'),),
    ),
    "hermes-cut-in-arguments": Recorded(
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": "Th',
        "",
        (("add", '{"a": "Th'),),
    ),
    "hermes-cut-in-string-arguments": Recorded(
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a',
        "",
        (("add", '"{\\"a'),),
    ),
    "hermes-cut-in-name": Recorded(
        "hermes", 'Hm <tool_call>{"name": "ad', 'Hm <tool_call>{"name": "ad'
    ),
    "hermes-cut-in-closing-mark": Recorded(
        "hermes", '<tool_call>{"name": "now", "arguments": {}}\n</tool_', "", (("now", "{}"),)
    ),
    "hermes-no-json": Recorded(
        "hermes",
        "<tool_call>get_weather(Paris)</tool_call> or so",
        "<tool_call>get_weather(Paris)</tool_call> or so",
    ),
    "hermes-broken-then-right": Recorded(
        "hermes",
        '<tool_call>{"name": <tool_call>{"name": "now", "arguments": {}}</tool_call>',
        '<tool_call>{"name":',
        (("now", "{}"),),
    ),
    "hermes-arguments-not-ended": Recorded(
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call> and so on',
        "and so on",
        (("add", '{"a": 1'),),
    ),
    "hermes-junk-after-arguments": Recorded(
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1}, oh}</tool_call>',
        "oh}</tool_call>",
        (("add", '{"a": 1}'),),
    ),
    "hermes-no-name": Recorded(
        "hermes",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
    ),
    "hermes-only-text": Recorded(
        "hermes", " a <tool_cal b </tool_call> \n", " a <tool_cal b </tool_call> \n"
    ),
    "llama-bare": Recorded(
        "llama3",
        '{"name": "get_weather", "parameters": ' + PARIS + "}",
        "",
        (("get_weather", PARIS),),
    ),
    "llama-several": Recorded(
        "llama3",
        '\n{"name": "add", "parameters": {"a": 1}}; {"type": "function", "name": "now", '
        '"parameters": {}}\n<|python_tag|>{"name": "other", "arguments": {"b": 2}};',
        "",
        (("add", '{"a": 1}'), ("now", "{}"), ("other", '{"b": 2}')),
    ),
    "llama-tag-after-text": Recorded(
        "llama3",
        'Sure: <|python_tag|>{"name": "now", "parameters": {}}',
        "Sure:",
        (("now", "{}"),),
    ),
    "llama-python": Recorded(
        "llama3",
        '<|python_tag|>brave_search.call(query="x")',
        '<|python_tag|>brave_search.call(query="x")',
    ),
    "llama-json-answer": Recorded(
        "llama3",
        ' {"name": "Ada", "parameters": {"born": 1815}}',
        ' {"name": "Ada", "parameters": {"born": 1815}}',
    ),
    "llama-json-in-text": Recorded(
        "llama3",
        'It is {"name": "add", "parameters": {}}',
        'It is {"name": "add", "parameters": {}}',
    ),
    "llama-text-after": Recorded(
        "llama3",
        '{"name": "add", "parameters": {}} ; so',
        "; so",
        (("add", "{}"),),
    ),
    "kimi-two": Recorded(
        "kimi",
        "I'll look.\n"
        + k2(("functions.get_weather:0", PARIS), ("functions.add:1", '{"a": 1}'))
        + "\n",
        "I'll look.",
        (("get_weather", PARIS), ("add", '{"a": 1}')),
    ),
    "kimi-odd-heads": Recorded(
        "kimi",
        k2(("now", ""), (" functions.a.b:12 ", " {} \n"), close=False),
        "",
        (("now", "{}"), ("a.b", "{}")),
    ),
    "kimi-no-call": Recorded(
        "kimi", kimi_k2.OPEN + " hello" + kimi_k2.CLOSE, kimi_k2.OPEN + " hello" + kimi_k2.CLOSE
    ),
    "kimi-empty-section": Recorded("kimi", "a" + kimi_k2.OPEN + kimi_k2.CLOSE + "b", "ab"),
    "kimi-no-head": Recorded(
        "kimi",
        kimi_k2.OPEN
        + kimi_k2.CALL_OPEN
        + "x"
        + kimi_k2.CALL_CLOSE
        + k2(("now", "{}"))[len(kimi_k2.OPEN) :],
        kimi_k2.OPEN + kimi_k2.CALL_OPEN + "x" + kimi_k2.CALL_CLOSE,
        (("now", "{}"),),
    ),
    "kimi-cut": Recorded(
        "kimi",
        kimi_k2.OPEN + kimi_k2.CALL_OPEN + "functions.add:3" + kimi_k2.SEPARATOR + '{"a": ',
        "",
        (("add", '{"a":'),),
    ),
    "kimi-cut-in-head": Recorded(
        "kimi",
        "x" + kimi_k2.OPEN + kimi_k2.CALL_OPEN + "functions.a",
        "x" + kimi_k2.OPEN + kimi_k2.CALL_OPEN + "functions.a",
    ),
    "kimi-call-not-closed": Recorded(
        "kimi",
        kimi_k2.OPEN + kimi_k2.CALL_OPEN + "now:0" + kimi_k2.SEPARATOR + "{}" + kimi_k2.CLOSE + "b",
        "b",
        (("now", "{}"),),
    ),
    "v3-two": Recorded(
        "v3",
        "One moment." + v3(("get_weather", PARIS), ("add", '{"a":\n "```"}')),
        "One moment.",
        (("get_weather", PARIS), ("add", '{"a":\n "```"}')),
    ),
    "v3-cut-before-the-end": Recorded(
        "v3",
        v3(("add", '{"a": 1}'))[: -len(deepseek.CALL_CLOSE + deepseek.CLOSE)],
        "",
        (("add", '{"a": 1}'),),
    ),
    "v3-wrong-kind": Recorded(
        "v3",
        v3(("add", "{}")).replace("function", "tool"),
        v3(("add", "{}")).replace("function", "tool"),
    ),
    "v31-two": Recorded(
        "v31",
        v31(("get_weather", PARIS), ("function", "{}")),
        "",
        (("get_weather", PARIS), ("function", "{}")),
    ),
    "v31-no-name": Recorded("v31", v31(("", "{}")), v31(("", "{}"))),
}


def told(pieces: list[Piece]) -> tuple[str, tuple[tuple[str, str], ...]]:
    content = "".join(p.text for p in pieces if isinstance(p, Content))
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        match piece:
            case CallStart(index, name=name):
                assert index == len(calls)
                calls[index] = [name, ""]
            case CallArguments(index, text):
                calls[index][1] += text
    return content, tuple((name, text) for name, text in calls.values())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_recorded_answers_become_content_and_calls(case: Recorded) -> None:
    """What each family writes is understood, and what is no call is content."""
    assert told(parse(case.kind, [case.text])) == (case.content, case.calls)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pieces_do_not_depend_on_where_the_text_is_cut(case: Recorded) -> None:
    """Steps of any length end anywhere: every cut in two and single characters give the same."""
    whole = parse(case.kind, [case.text])
    assert parse(case.kind, case.text) == whole
    for at in range(len(case.text) + 1):
        assert parse(case.kind, [case.text[:at], case.text[at:]]) == whole, case.text[:at]


def test_arguments_are_told_while_they_grow() -> None:
    """A client sees a long argument come, not only its end."""
    for kind, text in (
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "xxxxx'),
        ("llama3", '{"name": "add", "parameters": {"a": "xxxxx'),
        ("kimi", k2(("functions.add:0", "@"))[: -len(kimi_k2.CALL_CLOSE + kimi_k2.CLOSE) - 1]),
        ("v31", v31(("add", "@"))[: -len(deepseek.CALL_CLOSE + deepseek.CLOSE) - 1]),
    ):
        parser = PARSERS[kind](NAMES, ids())
        parser.feed(text)
        assert parser.feed("grow") == [CallArguments(0, "grow")]


def test_a_call_of_kimi_keeps_the_id_that_the_model_wrote() -> None:
    """The template shows it to the model again, which counts on."""
    pieces = parse("kimi", [k2(("functions.add:4", "{}"), ("add", "{}"))])
    assert [p for p in pieces if isinstance(p, CallStart)] == [
        CallStart(0, "functions.add:4", "add"),
        CallStart(1, "call_0", "add"),
    ]


MARKS = [
    "a",
    " ",
    "\n",
    ";",
    "{",
    "}",
    '"',
    "\\",
    ":",
    ",",
    "[",
    "]",
    '{"name": "add", "arguments": ',
    '"name"',
    hermes.OPEN,
    hermes.CLOSE,
    llama3.TAG,
    kimi_k2.OPEN,
    kimi_k2.CLOSE,
    kimi_k2.CALL_OPEN,
    kimi_k2.SEPARATOR,
    kimi_k2.CALL_CLOSE,
    deepseek.OPEN,
    deepseek.CLOSE,
    deepseek.CALL_OPEN,
    "function",
    deepseek.SEPARATOR,
    "```json",
    "```",
    deepseek.CALL_CLOSE,
]


@given(
    kind=st.sampled_from(sorted(PARSERS)),
    parts=st.lists(st.sampled_from(MARKS), max_size=14),
    data=st.data(),
)
def test_no_text_breaks_a_parser(kind: str, parts: list[str], data: st.DataObject) -> None:
    """Whatever a model writes: no crash, the same pieces for every cut, nothing lost but marks."""
    text = "".join(parts)
    whole = parse(kind, [text])
    assert parse(kind, text) == whole
    at = data.draw(st.integers(0, len(text)))
    assert parse(kind, [text[:at], text[at:]]) == whole
    content, calls = told(whole)
    if not calls and kind in {"hermes", "llama3"}:
        assert content == text
    for _, arguments in calls:
        assert arguments


def test_a_long_answer_is_parsed_in_linear_time() -> None:
    """An answer of the longest kind, a character a step, takes moments."""
    body = json.dumps({"a": "x" * 100_000})
    text = f'<tool_call>{{"name": "add", "arguments": {body}}}</tool_call>'
    assert told(parse("hermes", text)) == ("", (("add", body),))
