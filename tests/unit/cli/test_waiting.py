"""What a terminal shows while a model is loaded and its graphs are captured."""

from __future__ import annotations

import io

import pytest

from paceline.cli import console
from paceline.cli.console import PlainConsole, waiting


@pytest.mark.parametrize("terminal", [True, False])
def test_a_sign_becomes_a_bar(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> None:
    """One at a time, as a terminal allows no two; a file gets neither."""
    out = io.StringIO()
    monkeypatch.setattr(
        console, "notes", lambda: PlainConsole(file=out, force_terminal=terminal, width=100)
    )
    with waiting("loading it", "capturing") as bar:
        assert "capturing" not in out.getvalue()
        bar(1, 8)
        bar(8, 8)
    assert ("loading it" in out.getvalue()) == terminal
    assert ("capturing" in out.getvalue()) == terminal
    assert ("8/8" in out.getvalue()) == terminal
