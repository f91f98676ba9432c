"""Trees on the wire: told to those who ask, in streams, with every node's text and source."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from paceline.api.results import joined
from paceline.api.server.encoding import encoded
from paceline.api.server.sources import tree_of
from paceline.core.request import VerifiedTree
from tests.fake_engine import EOS
from tests.served import chat_call, completion_call, context, ids, refusal, run, served

SCRIPT = [*ids("the end of it"), EOS]
A, B, C = ids("abc")
TREE = VerifiedTree(
    start=1,
    token_ids=(A, B, C, C),
    parents=(-1, 0, 0, 1),
    sources=(0, 2, 1, 4),
    scores=(0.0, -0.25, float("-inf"), -1.23456789),
    path=(0, 1),
    emitted=(B, A),
)
CALLS = [chat_call, completion_call]


def choices(call: Any, chunks: list[Any]) -> list[dict[str, Any]]:
    stream = call.stream()
    return [c for chunk in chunks for event in stream.take(chunk) for c in event["choices"]]


@pytest.mark.parametrize("make", CALLS)
def test_a_chunk_tells_its_trees(make) -> None:
    """The page draws what the step verified: nodes, their parents and sources, the accepted path."""
    with served(SCRIPT) as (llm, found):
        call = make(found, stream=True, paceline={"tree": True})
        chunks = [replace(chunk, trees=(TREE,)) for chunk in run(llm, call.job)]
        told = [c["paceline"] for c in choices(call, chunks) if "paceline" in c]
    assert len(told) == len(chunks)
    assert set(told[0]) == {"trees"}
    [tree] = told[0]["trees"]
    assert tree["tokens"] == ["a", "b", "c", "c"]
    assert tree["token_ids"] == [A, B, C, C]
    assert tree["parents"] == [-1, 0, 0, 1]
    assert tree["sources"] == ["target", "past outputs", "own text", found.source(4)]
    assert tree["path"] == [0, 1]
    assert (tree["start"], tree["emitted"], tree["emitted_ids"]) == (1, ["b", "a"], [B, A])
    assert tree["scores"] == [0.0, -0.25, None, -1.2346]
    assert json.loads(encoded(tree)) == tree, "JSON has no infinity"


@pytest.mark.parametrize("make", CALLS)
@pytest.mark.parametrize("asked", [None, {}, {"sources": True}, {"tree": False}])
def test_who_does_not_ask_gets_none(make, asked) -> None:
    """Trees are many times as large as the text; the engine does not even keep them for others."""
    with served(SCRIPT) as (llm, found):
        call = make(found, stream=True, paceline=asked)
        assert not call.job.shows_trees
        chunks = [replace(chunk, trees=(TREE,)) for chunk in run(llm, call.job)]
        told = choices(call, chunks)
    assert not any("trees" in c.get("paceline", {}) for c in told)


@pytest.mark.parametrize("make", CALLS)
def test_trees_need_a_stream(make) -> None:
    """No option is silently ignored."""
    assert make(context(), stream=True, paceline={"tree": True}).job.shows_trees
    error = refusal(make, context(), paceline={"tree": True})
    assert (error.status, error.param) == (400, "paceline.tree")
    assert "stream: true" in str(error)


def test_chunks_that_are_joined_keep_all_trees() -> None:
    """A reader that is slow for a moment still sees every step."""
    with served(SCRIPT) as (llm, found):
        chunks = run(llm, chat_call(found).job)
    marked = [replace(c, trees=(replace(TREE, start=i),)) for i, c in enumerate(chunks)]
    assert [tree.start for tree in joined(marked).trees] == list(range(len(chunks)))


def test_a_piece_of_a_character_has_a_mark() -> None:
    """The text of half a character is not known."""
    half = ids("é")[0]
    tree = replace(TREE, token_ids=(half, B, C, C))
    assert tree_of(tree, context())["tokens"][0] == "�"
