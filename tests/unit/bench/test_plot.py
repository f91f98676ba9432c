from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from paceline.bench import plot
from paceline.core.errors import ConfigError

GROUPS = [
    {"group": name, "accept_length": length, "speed_ratio": ratio}
    for name, length, ratio in (("qa", 1.5, 1.2), ("rag", 2.5, 1.9), ("all", 2.0, 1.5))
]
RECORD = {
    "config": {"model": "default"},
    "settings": {"temperature": 0.0},
    "results": [{"spec": "ngram", "groups": GROUPS}, {"spec": "suffix", "groups": GROUPS}],
}


def test_a_record_becomes_a_picture(tmp_path: Path) -> None:
    """Any record can be drawn, without a display."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.svg"
    plot.draw(RECORD, path)
    text = path.read_text(encoding="utf-8")
    assert text.rstrip().endswith("</svg>")


def test_an_unknown_kind_is_refused_before_the_run(tmp_path: Path) -> None:
    """Hours of measuring don't end in a misspelt suffix."""
    with pytest.raises(ConfigError, match=r"possible are \.png, \.svg, \.pdf"):
        plot.check(tmp_path / "bench.gif2")


def test_without_matplotlib_the_way_to_get_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plot is optional, and so is what draws it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[plots\]'"):
        plot.check(tmp_path / "bench.png")
