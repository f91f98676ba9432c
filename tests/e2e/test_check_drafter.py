"""`paceline check drafter`, whole: tiny checkpoints, real files, one record at the end of stdout."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from paceline import LLM
from paceline.cli import main
from paceline.core.errors import ConfigError
from paceline.engine import fitness
from tests import tiny
from tests.tiny_drafters import write_dflash
from tests.tiny_eagle3 import write_eagle3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose positions hold the built-in prompts, written out letter by letter."""
    folder = tmp_path_factory.mktemp("target")
    return tiny.write_tiny(folder, "llama", max_position_embeddings=1024)


def check(target: Path, *arguments: str) -> int:
    """The command's exit code."""
    words = ["check", "drafter", "--model", str(target), "--dtype", "float32"]
    return main([*words, "--max-tokens", "24", *arguments])


@pytest.mark.parametrize("method", ["dflash", "eagle3", "merged"])
def test_a_drafter_of_nothing_is_named(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    """Random weights: exit code 1, a table and a verdict on stderr, the record last on stdout."""
    write = write_eagle3 if method == "eagle3" else write_dflash
    folder, out = write(tmp_path / "drafter", target), tmp_path / "record.json"
    code = check(target, "--spec", method, "--spec-model", str(folder), "--out", str(out))
    printed = capsys.readouterr()
    assert code == 1, printed.err
    record = json.loads(printed.out.splitlines()[-1])
    assert record == json.loads(out.read_text())
    assert (record["fits"], record["outcome"]) == (False, "another target")
    assert record["trials"][0]["reading"] == "as configured"
    assert record["trials"][0]["num_places"] > 40
    assert (record["vocabulary"] is not None) == (method == "eagle3")
    assert "another target: " in printed.err
    assert "as configured" in printed.err


def test_a_drafter_that_cannot_be_loaded_is_in_the_record(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another vocabulary and another number of layers: both are said, and the exit code is 1."""
    folder = write_dflash(tmp_path / "drafter", target, vocab_size=98, num_target_layers=3)
    assert check(target, "--spec", "dflash", "--spec-model", str(folder)) == 1
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["outcome"] == "refused"
    assert "vocabulary: 98 here, 97 in the target" in record["advice"]
    assert "number of target layers: 3 here, 2 in the target" in record["advice"]


def test_another_tokenizer_is_named(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer beside the drafter that reads texts otherwise."""
    folder = write_dflash(tmp_path / "drafter", target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (target / name).read_text(encoding="utf-8")
        (folder / name).write_text(text, encoding="utf-8")
    check(target, "--spec", "dflash", "--spec-model", str(folder))
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["tokenizer"] is None
    other = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    other["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(other), encoding="utf-8")
    assert check(target, "--spec", "dflash", "--spec-model", str(folder)) == 1
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "otherwise than the target's" in record["tokenizer"]


@pytest.mark.parametrize("spec", ["suffix", "none", "auto"])
def test_a_drafter_of_no_target_needs_no_check(
    target: Path, capsys: pytest.CaptureFixture[str], spec: str
) -> None:
    """Drafters without a network: exit code 2 and what can be checked."""
    assert check(target, "--spec", spec) == 2
    assert "is no network" in capsys.readouterr().err
    assert check(target, "--spec", spec, "--spec-model", "folder") == 2
    assert "uses no folder" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_one_of_no_use_does_not_serve(
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    """It is tested before anything is decoded, once, and refused; a flag serves it as it is."""
    monkeypatch.setattr(fitness, "cache_folder", lambda: tmp_path)
    folder = write_dflash(tmp_path / "drafter", target, seed=len(command))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the"}\n')
    what = {"generate": ["the"], "bench": [str(prompts), "--raw", "--warmup", "0"]}[command]
    options = ["--model", str(target), "--dtype", "float32", "--max-len", "256", "--threads", "1"]
    words = [command, *what, "--max-tokens", "4", *options]
    words += ["--spec", "ddtree", "--spec-model", str(folder)]
    with caplog.at_level(logging.INFO, "paceline.engine.fitness"):
        assert main(words) == 2
        assert caplog.text.count("testing whether the drafter") == 1
        assert main(words) == 2
        assert caplog.text.count("testing whether the drafter") == 1
    printed = capsys.readouterr()
    assert printed.err.count("does not belong to this model (another target)") == 2
    assert "paceline: INFO: testing whether the drafter" in printed.err
    assert "--spec-check off" in printed.err
    assert not printed.out
    assert main([*words, "--spec-check", "off"]) == 0


def test_a_library_is_told_too(target: Path, tmp_path: Path) -> None:
    """LLM raises what the command line prints."""
    folder = write_dflash(tmp_path / "drafter", target, seed=9)
    options = {"dtype": "float32", "max_len": 256, "threads": 1, "spec_model": str(folder)}
    with pytest.raises(ConfigError, match="another target"):
        LLM(str(target), spec="dflash", **options)
    with LLM(str(target), spec="dflash", spec_check="off", **options) as llm:
        assert llm.spec.name == "dflash"
