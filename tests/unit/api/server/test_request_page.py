from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.api.server.protocol_chat import ChatRequest
from paceline.api.server.protocol_completions import CompletionRequest
from paceline.api.server.protocol_refused import ELSEWHERE, REFUSED
from paceline.api.server.protocol_responses import ResponsesRequest
from paceline.api.server.protocol_sampling import ALIASES
from paceline.api.server.protocol_tokens import DetokenizeRequest, TokenizeRequest

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "serve_requests.md"


@pytest.mark.parametrize(
    "model", [ChatRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest]
)
def test_every_field_is_documented(model) -> None:
    """A field that only its author knows is nobody's."""
    named = set(re.findall(r"`([\w.]+)`", PAGE.read_text(encoding="utf-8")))
    assert set(model.model_fields) <= named


def test_every_refusal_and_alias_is_documented() -> None:
    """Who moves from another server looks here first; what is no longer refused must go."""
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("## Other servers' names") : text.index("## Other paths' fields")]
    aliases, refused = section.split("Refused with 400")
    assert set(re.findall(r"`([\w.]+)`", aliases)) == set(ALIASES)
    assert set(re.findall(r"`([\w.]+)`", refused)) == set(REFUSED)


def test_what_asks_for_nothing_is_documented() -> None:
    """Of each field that other paths may be sent."""
    text = PAGE.read_text(encoding="utf-8").partition("## Other paths' fields")[2]
    rows = re.findall(r"^\| (`.*?) \|", text.partition("## Answers")[0], re.MULTILINE)
    assert set(ELSEWHERE) <= set(re.findall(r"`(\w+)`", " ".join(rows)))


@pytest.mark.parametrize(
    "page,title",
    [("serve_requests.md", "## What nobody should send"), ("serve.md", "## What bad input gets")],
)
def test_every_row_names_a_test_that_exists(page: str, title: str) -> None:
    """A table of promises names who keeps them, in which file."""
    text = (PAGE.parent / page).read_text(encoding="utf-8").partition(f"\n{title}\n")[2]
    rows = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 9
    for row in rows:
        named = re.findall(r"`([^`]*test_[^`]*)`", row.rpartition(" | ")[2])
        assert named, row
        for place in named:
            file, _, name = place.partition("::")
            source = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", source, re.MULTILINE), place
