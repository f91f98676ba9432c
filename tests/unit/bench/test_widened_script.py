"""The script that compares a widened model with the small one, on tiny ones."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.tiny_drafters import write_dflash
from tests.tiny_eagle3 import write_eagle3
from tests.widened import facts, widen

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "widened.py"


def compared(wide: Path, small: Path, *more: str) -> dict[str, Any]:
    prompts = wide.parent / "prompts.jsonl"
    turns = ("the thing and the other", "an end of the")
    prompts.write_text(
        "".join(json.dumps({"turns": [turn], "category": "qa"}) + "\n" for turn in turns)
    )
    argv = [str(wide), "--model", str(small), "--prompts", str(prompts), "--limit", "2", *more]
    flags = ["--dtype", "float64", "--device", "cpu", "--max-len", "200", "--max-tokens", "24"]
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *argv, *flags], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_it_says_what_is_equal_and_where_answers_part(tmp_path: Path) -> None:
    """Equal answers and accept lengths are counted, and a target that is another one is found out."""
    small = tiny.write_tiny(tmp_path / "small", "llama", seed=2, num_hidden_layers=7)
    drafters = [write_dflash(tmp_path / "one", small), write_eagle3(tmp_path / "two", small)]
    wide = widen(small, tmp_path / "wide", *drafters, num_layers=9)
    flags = [w for folder in drafters for w in ("--drafter", str(folder))]
    record = compared(wide, small, *flags)
    assert record["widened"] == facts(wide)
    assert [row["drafter"] for row in record["rows"]] == ["none", "ddtree", "eagle3"]
    for row in record["rows"]:
        assert row["answers"] == row["equal"] == row["accept_lengths_equal"] == 2
        assert row["differences"] == []
        assert row["accept_length_small"] == row["accept_length_wide"]
    file = wide / "target" / "model.safetensors"
    tensors = load_file(file)
    name = "model.norm.weight"
    tensors[name] = torch.where(tensors[name] > 0, tensors[name], 0.0)
    save_file(tensors, file, metadata={"format": "pt"})
    (row,) = compared(wide, small, "--drafter", str(tmp_path / "nowhere"))["rows"]
    assert row["equal"] < 2
    assert row["differences"][0]["margin_nats"] > 0


@pytest.mark.parametrize(
    "words,said",
    [
        (("--device", "mps"), "device 'mps' is not supported"),
        (
            ("--device", "cpu", "--prompts", "nowhere.jsonl"),
            "cannot read prompts from nowhere.jsonl",
        ),
        (("--device", "cpu"), "add --make, or run `paceline widen` first"),
    ],
)
def test_mistakes_are_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    """In one message with exit code 2, before a model is loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path / "wide"), *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert said in " ".join(told.split())
    assert "Traceback" not in told
