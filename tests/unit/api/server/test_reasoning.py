"""Reasoning is told apart from the answer, wherever the text is cut, and its tokens are counted."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from paceline.api.server.pieces import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
    chat_delta,
    chat_message,
    merged,
)
from paceline.api.server.reasoning import (
    AnswerParser,
    ThinkForm,
    Thinking,
    ThinkParser,
    count_reasoning,
)
from paceline.api.server.tool_parsers import kimi_k2
from paceline.api.server.tool_parsers.hermes import HermesParser
from paceline.api.server.tool_parsers.kimi_k2 import KimiK2Parser

KIMI_CALL = (
    f"{kimi_k2.OPEN}{kimi_k2.CALL_OPEN}functions.now:0{kimi_k2.SEPARATOR}{{}}"
    f"{kimi_k2.CALL_CLOSE}{kimi_k2.CLOSE}"
)
HERMES_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@dataclass(frozen=True)
class Recorded:
    thinking: Thinking
    text: str
    pieces: tuple[Piece, ...]
    family: str = "hermes"


CALL = (CallStart(0, "id", "now"), CallArguments(0, "{}"))
CASES = {
    "the model opens": Recorded(
        Thinking.MAYBE,
        "<think>\nTwo  and\n\ntwo.\n</think>\n\nFour 🙂.\n",
        (Reasoning("Two  and\n\ntwo."), Content("Four 🙂.\n")),
    ),
    "the prompt opened": Recorded(
        Thinking.OPEN,
        "\nTwo and two.\n</think>\n\nFour.",
        (Reasoning("Two and two."), Content("Four.")),
    ),
    "the prompt closed": Recorded(
        Thinking.CLOSED, "<think> is a tag", (Content("<think> is a tag"),)
    ),
    "none came": Recorded(Thinking.MAYBE, " \n Four <think>", (Content(" \n Four <think>"),)),
    "half a mark": Recorded(Thinking.MAYBE, "\n<thin", (Content("\n<thin"),)),
    "nothing within": Recorded(Thinking.MAYBE, "<think>\n\n</think>\n\nFour", (Content("Four"),)),
    "not closed": Recorded(Thinking.OPEN, "Two and </thin ", (Reasoning("Two and </thin "),)),
    "cut in the mark": Recorded(Thinking.OPEN, "Two and </thi", (Reasoning("Two and </thi"),)),
    "then a call": Recorded(
        Thinking.OPEN,
        f"I could <tool_call>.</think>\n\n{HERMES_CALL}",
        (Reasoning("I could <tool_call>."), *CALL),
    ),
    "text and a call": Recorded(
        Thinking.MAYBE,
        f"<think>Hm</think>So: {HERMES_CALL}",
        (Reasoning("Hm"), Content("So:"), *CALL),
    ),
    "kimi forgot to close": Recorded(
        Thinking.OPEN,
        f"Two and  {KIMI_CALL}",
        (Reasoning("Two and"), CallStart(0, "functions.now:0", "now"), CallArguments(0, "{}")),
        "kimi",
    ),
    "nothing": Recorded(Thinking.OPEN, "", ()),
}


def parser_of(case: Recorded) -> AnswerParser:
    if case.family == "kimi":
        form = ThinkForm(also_ends=KimiK2Parser.opens)
        return AnswerParser(ThinkParser(form, case.thinking), KimiK2Parser())
    calls = HermesParser(new_id=lambda: "id")
    return AnswerParser(ThinkParser(ThinkForm(), case.thinking), calls)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reasoning_is_told_apart_however_the_text_is_cut(case: Recorded) -> None:
    """A step may end within a mark: every cut in two, and single characters, give the same."""
    cuts = [[case.text], list(case.text)]
    cuts += [[case.text[:at], case.text[at:]] for at in range(len(case.text) + 1)]
    for parts in cuts:
        parser = parser_of(case)
        pieces = [piece for part in parts for piece in parser.feed(part)]
        assert merged([*pieces, *parser.finish()]) == list(case.pieces), parts


def test_reasoning_is_told_while_it_grows() -> None:
    """Reasoning may take minutes: a client sees it come."""
    parser = ThinkParser(ThinkForm(), Thinking.MAYBE)
    parser.feed("<think>\nLet me")
    assert parser.feed(" see") == [Reasoning(" see")]


@pytest.mark.parametrize(
    "prompt,thinking",
    [
        ("<|im_start|>assistant\n", Thinking.MAYBE),
        ("<｜Assistant｜><think>\n", Thinking.OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Thinking.CLOSED),
        ("user: what is <think>?\nassistant:", Thinking.MAYBE),
    ],
)
def test_the_end_of_the_prompt_says_where_the_reasoning_stands(
    prompt: str, thinking: Thinking
) -> None:
    """Templates open the reasoning, close it, or leave it to the model; a user's text says nothing."""
    assert ThinkForm().after(prompt) is thinking


class Spelled:
    """Token ids are indices of pieces of text."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def count(self, thinking: Thinking, form: ThinkForm | None = None) -> int:
        return count_reasoning(range(len(self.pieces)), self, form or ThinkForm(), thinking)


@pytest.mark.parametrize(
    "pieces,thinking,count",
    [
        ((b"<think>", b"\n", b"Hm", b".", b"</think>", b"\n\n", b"Four"), Thinking.MAYBE, 3),
        ((b"\n<thi", b"nk>Hm", b" so</", b"think>", b"Four"), Thinking.MAYBE, 2),
        ((b"Hm", b"\xf0\x9f", b"\x99\x82", b"</think>", b"Four"), Thinking.OPEN, 3),
        ((b"Hm", b"", b" so"), Thinking.OPEN, 2),
        ((b"Four", b"<think>", b"Hm"), Thinking.MAYBE, 0),
        ((b"<think>", b"Hm"), Thinking.CLOSED, 0),
        ((b"<think>", b"</think>", b"Four"), Thinking.MAYBE, 0),
    ],
)
def test_the_tokens_of_the_reasoning_are_counted(
    pieces: tuple[bytes, ...], thinking: Thinking, count: int
) -> None:
    """Marks may be tokens or not, and characters may lie across tokens; the count is exact."""
    assert Spelled(*pieces).count(thinking) == count


def test_another_mark_ends_the_count_too() -> None:
    """What is told as reasoning and what is counted as such end in one place."""
    form = ThinkForm(also_ends=(kimi_k2.OPEN,))
    spelled = Spelled(b"Hm", kimi_k2.OPEN.encode(), b"functions", b"</think>")
    assert spelled.count(Thinking.OPEN, form) == 1


def test_a_chat_answer_is_made_of_pieces() -> None:
    """A delta tells of a call once, with its first arguments; a message without text says null."""
    pieces = [Reasoning("Hm"), Content("So"), CallStart(0, "a", "now"), CallArguments(0, "{")]
    assert chat_delta(pieces) == {
        "reasoning_content": "Hm",
        "content": "So",
        "tool_calls": [
            {
                "index": 0,
                "id": "a",
                "type": "function",
                "function": {"name": "now", "arguments": "{"},
            }
        ],
    }
    assert chat_delta([CallArguments(0, "}")]) == {
        "tool_calls": [{"index": 0, "function": {"arguments": "}"}}]
    }
    assert chat_message([*pieces[2:], CallArguments(0, "}")]) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        ],
    }
    assert chat_message([]) == {"role": "assistant", "content": ""}
