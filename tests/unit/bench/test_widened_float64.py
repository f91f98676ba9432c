"""The script that compares widened networks with the small ones in float64, on tiny ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.tiny_drafters import write_dflash
from tests.tiny_eagle3 import write_eagle3
from tests.widened import SIZES

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "widened_float64.py"


def compared(small: Path, *more: str, code: int) -> dict[str, Any]:
    sizes = {**SIZES, "num_layers": 9}
    flags = [word for key, size in sizes.items() for word in ("--size", f"{key}={size}")]
    argv = ["--model", str(small), "--device", "cpu", "--tokens", "20", "--steps", "2", *flags]
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *argv, *more], capture_output=True, text=True, check=False
    )
    assert ran.returncode == code, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_it_says_how_far_logits_are_apart(tmp_path: Path) -> None:
    """Every network over all its positions; a difference that is too large fails."""
    small = tiny.write_tiny(tmp_path / "small", "llama", seed=2, num_hidden_layers=7)
    folders = [write_dflash(tmp_path / "one", small), write_eagle3(tmp_path / "two", small)]
    drafters = [word for folder in folders for word in ("--drafter", str(folder))]
    record = compared(small, *drafters, "--limit", "2", code=0)
    assert record["ok"]
    rows = record["rows"]
    assert [row["network"] for row in rows] == ["target", "one", "two"]
    assert rows[0]["positions"] == 2 * (20 + 2)
    assert rows[0]["parameters"] == record["widened"]["target"]["parameters"]
    for row in rows:
        assert 0 < row["largest_difference"] < 1e-11
        assert row["spread_of_logits"] > 0.3
        assert row["other_choices"] == 0
    record = compared(small, "--without-drafters", "--limit", "1", "--most", "1e-16", code=1)
    assert not record["ok"]
    assert len(record["rows"]) == 1
