"""The script that measures throughput on a widened model, at a tiny width; and widening in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import models
from paceline.api.widen import plan_widening
from paceline.bench.widen_load import load_target
from tests import tiny
from tests.tiny_drafters import write_dflash
from tests.tiny_eagle3 import write_eagle3
from tests.widened import SIZES

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "widened_speed.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tiny(tmp_path_factory.mktemp("speed") / "small", "llama", seed=2)


def measured(folder: Path, small: Path, *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The script's record from its stdout, and from its file."""
    prompts = folder / "prompts.jsonl"
    lines = [{"task_id": str(i), "prompt": f"the thing and {i} other"} for i in range(5)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = subprocess.run(
        [
            *(sys.executable, str(SCRIPT), str(folder / "wide"), "--model", str(small)),
            *("--prompts", str(prompts), "--device", "cpu", "--dtype", "float64"),
            *("--max-len", "200", "--max-tokens", "32", "--sequences", "1", "3"),
            *("--rounds", "1", "--least", "2", "--out", str(folder / "record.json")),
            *(word for name, value in SIZES.items() for word in ("--size", f"{name}={value}")),
            *more,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1]), json.loads((folder / "record.json").read_text())


def test_a_target_in_memory_is_the_one_in_files(small: Path, tmp_path: Path) -> None:
    """Every tensor bit by bit, and nothing but configuration and tokenizer is written."""
    planned = plan_widening(model=str(small), drafters=("none",), sizes=SIZES, dtype="float32")
    planned.write(tmp_path / "wide", shard_bytes=1 << 30, progress=lambda _, __: None)
    files = models.resolve(str(tmp_path / "wide" / "target"))
    written = models.load(files, device=CPU, dtype=torch.float32, weights="bf16")
    made = load_target(planned.parts[0], tmp_path / "memory", CPU, planned.seed)
    assert made.config == written.config
    names = [name for name, _ in written.net.named_parameters()]
    assert names
    for (name, mine), (other, want) in zip(
        made.net.named_parameters(), written.net.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(mine, want), name
    assert not list((tmp_path / "memory").glob("*.safetensors"))


@pytest.mark.slow
def test_throughput_and_accept_lengths(small: Path, tmp_path: Path) -> None:
    """Each drafter at each number of sequences: the small model's answers and accept lengths."""
    folders = [write_dflash(tmp_path / "one", small), write_eagle3(tmp_path / "two", small)]
    words = [w for folder in folders for w in ("--drafter-folder", str(folder))]
    nodes = '"num_speculative_tokens": 4'
    for config in (
        '"method": "none"',
        f'"method": "ddtree", {nodes}',
        f'"method": "eagle3", "eagle_num_steps": 2, {nodes}',
        f'"method": "ngram", {nodes}',
        '"method": "ddtree", "num_speculative_tokens": 1',
    ):
        words += ["--drafter", f"{{{config}}}"]
    record, kept = measured(tmp_path, small, *words)
    assert kept == record
    assert record["left_out"] == []
    rows = record["rows"]
    names = ("none", "ddtree", "eagle3", "ngram", "ddtree")
    assert [(r["drafter"], r["sequences"]) for r in rows] == [(n, s) for n in names for s in (1, 3)]
    for row in rows:
        assert row["prompts"] == {1: 2, 3: 5}[row["sequences"]]
        assert row["tok_s"] == pytest.approx(row["tokens"] / row["seconds"], rel=0.05)
        assert row["differences"]["equal"] == row["prompts"]
        assert row["differences"]["parted"] == 0
        if row["drafter"] == "none":
            assert (row["over_plain"], row["accept_length"]) == (1.0, 1.0)
        else:
            # A network's calibration knows what was answered before, which is not the same.
            assert row["accept_length_small"] == pytest.approx(row["accept_length"], rel=0.01)
            assert row["over_small"] == pytest.approx(1.0, rel=0.01)
            assert row["accept_length"] > 1.0
    assert rows[3]["accept_length"] > 1.02 * rows[9]["accept_length"], "each has one of its own"


@pytest.mark.slow
def test_what_does_not_fit_is_left_out(small: Path, tmp_path: Path) -> None:
    """There is a record all the same, which says so."""
    write_dflash(tmp_path / "one", small)
    words = ("--drafter-folder", str(tmp_path / "one"), "--seconds", "0")
    record, kept = measured(tmp_path, small, *words, "--drafter", '{"method": "none"}')
    assert kept == record
    assert record["rows"] == []
    assert record["left_out"] == ["none: no time"]
