"""A whole EAGLE-3 run on the answers of another run: trained, resumed, measured, exported, loaded back."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.cli import main as paceline
from paceline.core.errors import ConfigError
from paceline.draft import eagle3_checkpoint
from paceline.models import LoadedModel
from paceline.train import stages
from paceline.train.__main__ import main
from paceline.train.curve import read
from paceline.train.dflash_settings import DFlashSettings
from paceline.train.eagle3_settings import Eagle3Settings
from paceline.train.packing import Geometry, Packer
from paceline.train.settle import settle
from paceline.train.shards import Shards
from paceline.train.target import target_info
from paceline.train.vocabulary import fingerprint, most_frequent, trained_counts
from tests import tiny
from tests.unit.train.making import CHAIN, new_eagle3, new_eagle3_task, random_docs, write_docs

DATA = [
    *("--answer-tokens", "500", "--max-new-tokens", "12", "--max-prompt-tokens", "90"),
    *("--held-out", "0.3", "--own-share", "0.2", "--max-rows", "4", "--device", "cpu"),
]
TRAIN = [
    *("--taps", "0", "1", "2", "--draft-vocab", "60", "--ttt-steps", "3", "--mlp-size", "80"),
    *("--row-tokens", "96", "--batch-rows", "1", "--warmup", "2", "--evals", "1"),
    *("--eval-docs", "4", "--log-steps", "1", "--engine-prompts", "3", "--device", "cpu"),
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The entry sets the root logger's level."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    """The folder of a DFlash run that has prompts and answers, and trained nothing yet."""
    folder = tmp_path_factory.mktemp("answers")
    prompts = folder / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"say {i} and"}]} for i in range(30)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    words = ["dflash", str(folder / "run"), "--model", str(target_folder), *DATA]
    words += ["--prompts", str(prompts), "--steps", "3", "--stages", "prepare", "generate"]
    assert main(words) == 0
    return folder / "run"


def words(run: Path, answers: Path, *more: str) -> list[str]:
    return ["eagle3", str(run), "--answers", str(answers), *TRAIN, *more]


def test_a_run_on_another_runs_answers(
    tmp_path: Path, answers: Path, target: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is generated again; the export loads through the public loader and says how it came."""
    run = tmp_path / "run"
    with caplog.at_level(logging.INFO):
        assert main(words(run, answers, "--steps", "6")) == 0
    assert "draft vocabulary of 60 tokens: covers" in caplog.text
    assert not (run / "prompts").exists()
    assert not (run / "answers").exists()
    export = run / "export"
    names = {p.name for p in export.iterdir()}
    assert names == {"config.json", "model.safetensors", "card.md", "record.json"}

    info = target_info(target.net)
    loaded, best = (
        eagle3_checkpoint.load_plain(f, info, dtype=torch.bfloat16) for f in (export, run / "best")
    )
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, best.state_dict()[name]), name
    shards = Shards(answers / "answers")
    ids = most_frequent(trained_counts(shards, 97), 60)
    assert loaded.d2t.tolist() == ids.tolist()
    record = json.loads((export / "record.json").read_text())
    kinds = [line["kind"] for line in record["curve"]]
    assert kinds == [*["train"] * 6, "held_out", "engine"]
    assert record["engine"]["best"] >= 1.0
    assert record["vocabulary"] == fingerprint(ids)
    assert 0 < record["coverage_held_out"] <= 1
    assert record["settings"]["max_new_tokens"] == 12, "as the answers were made"
    card = (export / "card.md").read_text()
    for text in ("# EAGLE-3 drafter", "layers 0, 1, 2", "head has 60 of the", "chains of 3 steps"):
        assert text in card
    for text in (card, (export / "record.json").read_text()):
        assert str(answers.parent.parent) not in text, "where things lay concerns nobody"
    assert main(["eagle3", str(run), "--steps", "7", "--stages", "train"]) == 0, "it goes on"
    tuned = tmp_path / "tuned"
    more = ("--init", str(export), "--remap", "--draft-vocab", "50", "--steps", "2")
    assert main(words(tuned, answers, *more)) == 0
    card = (tuned / "export" / "card.md").read_text()
    assert "begun from the weights in `export`" in card
    assert "head has 50 of the" in card


def test_the_command_line_with_bars_is_the_same(
    tmp_path: Path, answers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`paceline train eagle3`, and time that is up."""
    run = tmp_path / "run"
    arguments = words(run, answers, "--steps", "2", "--stages", "train")
    assert paceline(["train", *arguments, "--minutes", "0.000001"]) == 3
    assert paceline(["train", *arguments]) == 0
    assert "complete: train" in capsys.readouterr().err
    stored = json.loads((run / "settings.json").read_text())
    assert (stored["method"], stored["draft_vocab"]) == ("eagle3", 60)


def test_an_interrupted_run_goes_on_to_the_same_losses(
    tmp_path: Path, answers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains, vocabulary and weights are as if nothing had happened."""
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    options = ("--steps", "6", "--stages", "train", "--anchors", "20")
    assert main(words(whole, answers, *options)) == 0
    make = stages.make_trainer

    def interrupted(*args: object) -> object:
        trainer = make(*args)
        step = trainer._step

        def counted(*parts: object) -> object:
            if trainer.journey.step == 4:
                raise KeyboardInterrupt
            return step(*parts)

        trainer._step = counted
        return trainer

    with monkeypatch.context() as patch:
        patch.setattr(stages, "make_trainer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(words(parted, answers, *options))
    assert main(["eagle3", str(parted), "--stages", "train"]) == 0
    lines = [
        [(x["step"], x["loss"], x["norm"]) for x in read(f / "curve.jsonl") if x["kind"] == "train"]
        for f in (whole, parted)
    ]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 6


def test_answers_that_do_not_fit_are_refused(
    tmp_path: Path, answers: Path, target_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No run, no answers, another target's, or said to be otherwise than they are."""
    empty = tmp_path / "empty"
    other = tiny.write_tiny(tmp_path / "other", "llama", seed=9, num_hidden_layers=3)
    settle(empty, {"own_share": 1.0, "steps": 1, "model": str(target_folder)}, DFlashSettings)
    cases = (
        (words(tmp_path / "a", tmp_path / "nothing"), "is no folder of a run"),
        (words(tmp_path / "b", empty), "holds no answers; go through its stages"),
        (words(tmp_path / "c", answers, "--model", str(other)), "holds sequences made with"),
        (words(tmp_path / "d", answers, "--temperatures", "0"), "--temperatures cannot be chosen"),
        (words(tmp_path / "e", answers, "--remap"), "remap is about a drafter given with --init"),
        (words(tmp_path / "f", answers, "--taps", "1"), "must be three layers: low, mid, high"),
        (words(answers, tmp_path), "holds a run that trains dflash, and this call trains eagle3"),
    )
    for arguments, message in cases:
        caplog.clear()
        assert main([*arguments, "--steps", "1"]) == 2, message
        assert message in caplog.text


def test_borrowed_answers_are_found_where_they_are(tmp_path: Path) -> None:
    """Through a run that borrows itself; never a run's own; settings of before there were two kinds."""
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    settle(one, {"own_share": 1.0, "steps": 1, "temperatures": (0.0, 0.5)}, DFlashSettings)
    settle(two, {"answers": (one,), "steps": 1}, Eagle3Settings)
    found = settle(three, {"answers": (two,), "steps": 1}, Eagle3Settings)
    assert found.answers == (one,)
    assert found.temperatures == (0.0, 0.5)
    assert settle(three, {}, Eagle3Settings) == found
    with pytest.raises(ConfigError, match="cannot use its own answers"):
        settle(one, {"answers": (two,), "steps": 1}, DFlashSettings)
    stored = json.loads((one / "settings.json").read_text())
    assert stored.pop("method") == "dflash"
    (one / "settings.json").write_text(json.dumps(stored))
    assert settle(one, {}, DFlashSettings).temperatures == (0.0, 0.5)


def test_exported_chains_are_the_trained_ones(tmp_path: Path, target: LoadedModel) -> None:
    """Through the public format and back: equal losses in float64, norm flags of the form included."""
    net = new_eagle3(target, fc_norm=True, norm_output=True)
    eagle3_checkpoint.save(net, tmp_path / "drafter", dtype=torch.float64)
    info = target_info(target.net)
    back = eagle3_checkpoint.load_plain(tmp_path / "drafter", info, dtype=torch.float64)
    assert back.config == net.config
    shards = write_docs(tmp_path / "docs", random_docs(9))
    batch = Packer(shards, Geometry(rows=1, row_tokens=64, anchors=5, targets=CHAIN), 0).batch(0)
    one, two = new_eagle3_task(target, net), new_eagle3_task(target, back)
    assert torch.equal(one.loss(batch), two.loss(batch))
