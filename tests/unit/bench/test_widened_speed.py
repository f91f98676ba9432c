"""The script that measures throughput on a widened model, at a tiny width; and widening in memory."""

from __future__ import annotations

import argparse
import importlib
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
from paceline.core.errors import MemoryBudgetError
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


def refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    small: Path,
    *more: str,
) -> tuple[int, str]:
    """The script's exit code and what it says, in this process."""
    words = [str(SCRIPT), str(folder), "--model", str(small), "--device", "cpu", *more]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    try:
        code = importlib.import_module("widened_speed").main()
    except SystemExit as end:  # `argparse`
        code = end.code
    return code, " ".join(capsys.readouterr().err.split())


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


@pytest.mark.parametrize(
    "words, said",
    [
        (("--size", "hidden_size"), "--size hidden_size is no size"),
        (("--size", "hidden_size=big"), "possible are hidden_size, num_layers"),
        (("--size", "width=4"), "--size width=4 is no size"),
        (("--drafter", "{bad"), "--drafter {bad is no drafter"),
        (("--drafter", "[]"), 'a JSON object with a "method"'),
        (("--drafter", '{"method": 3}'), "is no drafter"),
        (("--drafter", '{"method": "nothing"}'), "unknown drafter 'nothing'"),
        (
            ("--drafter", '{"method": "ngram", "num_speculative_tokens": "x"}'),
            "num_speculative_tokens must be a whole number, got 'x'",
        ),
        (("--sequences", "2", "0"), "--sequences 0 must be >= 1"),
        (("--max-tokens", "0", "--least", "0"), "--max-tokens 0 must be >= 1; --least 0"),
        (("--dtype", "floaty"), "choose from"),
        (("--device", "cuda:99"), "device 'cuda:99' was asked for"),
        (("--prompts", "nowhere.jsonl"), "cannot read prompts from nowhere.jsonl"),
    ],
)
def test_mistakes_are_told_at_once(
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    """In one message with exit code 2, before anything is loaded or made."""
    out = tmp_path / "wide"
    code, told = refused(monkeypatch, capsys, out, small, *words)
    assert code == 2
    assert said in told
    assert not out.exists()


def test_a_place_for_the_record_is_tried_before_it_is_full(
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Minutes of measuring do not end in a folder that cannot be made."""
    (tmp_path / "file").write_text("")
    for words, said in (
        (("--out", str(tmp_path / "file" / "record.json")), "cannot make a folder for"),
        ((), "file is a file; drafters go to a folder"),
    ):
        folder = tmp_path / ("wide" if words else "file")
        code, told = refused(monkeypatch, capsys, folder, small, *words)
        assert code == 2
        assert said in told
    assert not (tmp_path / "wide").exists()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), MemoryBudgetError("the KV pool needs more")]
)
def test_what_has_no_memory_is_left_out(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    """PyTorch's refusal, or an engine's that says what was being done."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    session_module = importlib.import_module("widened_session")
    session = session_module.Session(
        args=argparse.Namespace(out=None),
        clock=session_module.Clock(9.0, 9.0),
        tasks=(),
        tokens=None,
        header={},
    )
    with session.part():
        session.doing = "ddtree"
        raise error
    assert session.left_out == [f"ddtree: no memory ({error})"]


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
