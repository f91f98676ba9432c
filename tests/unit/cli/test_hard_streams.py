"""Standard streams that are closed, or can't show a character; a dash as a flag's value."""

from __future__ import annotations

import io
import sys

import pytest

from paceline.cli.console import open_streams, read_prompt
from paceline.core.errors import ConfigError


def test_closed_input_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """`<&-` makes stdin None in Python."""
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="closed"):
        read_prompt(None)
    assert read_prompt("given") == "given"


def test_closed_output_is_written_to_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """`>&-` makes stdout None in Python."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    open_streams()
    sys.stdout.write("nobody reads this")
    sys.stderr.write("nor this")
    sys.stdout.close()
    sys.stderr.close()


def test_characters_that_a_stream_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ASCII terminal shows a mark, and the answer goes on."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    open_streams()
    sys.stdout.write("a\u00e9b\n")
    sys.stdout.flush()
    assert raw.getvalue() == b"a?b\n"


def test_a_dash_as_a_flags_value_is_a_dash(run) -> None:
    """Only as an argument does "-" mean standard input."""
    seen = run("generate", "x", "--stop", "-", "--json", script=[70, *range(71, 97)])
    assert seen.code == 0
    assert '"stop_reason": "-"' in seen.out
