from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.api.server.protocol import REFUSED
from paceline.api.server.protocol_chat import ChatRequest
from paceline.api.server.protocol_completions import CompletionRequest
from paceline.api.server.protocol_sampling import ALIASES
from paceline.api.server.protocol_tokens import DetokenizeRequest, TokenizeRequest

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "serve_requests.md"


@pytest.mark.parametrize(
    "model", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
)
def test_every_field_is_documented(model) -> None:
    """A field that only its author knows is nobody's."""
    named = set(re.findall(r"`([\w.]+)`", PAGE.read_text(encoding="utf-8")))
    assert set(model.model_fields) <= named


def test_every_refusal_and_alias_is_documented() -> None:
    """Who moves from another server looks here first; what is no longer refused must go."""
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index("## Other servers' names") : text.index("## Answers")]
    aliases, refused = section.split("Refused with 400")
    assert set(re.findall(r"`([\w.]+)`", aliases)) == set(ALIASES)
    assert set(re.findall(r"`([\w.]+)`", refused)) == set(REFUSED)


def test_every_named_test_exists() -> None:
    """A table of promises names who keeps them."""
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    found = {name for text in sources for name in re.findall(r"def (test_\w+)\(", text)}
    assert named
    assert named <= found
