"""A whole run on a tiny target: every stage, resumed, exported, through both command lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.api.tokenizer import Tokenizer
from paceline.cli import main as paceline
from paceline.core.errors import ConfigError
from paceline.draft import dflash_checkpoint
from paceline.draft.dflash_config import SelectorConfig
from paceline.models import LoadedModel
from paceline.train import stages as finishing
from paceline.train.__main__ import main, parser
from paceline.train.dflash import DFlashTask, choose_mask_token, new_config
from paceline.train.dflash_settings import DFlashSettings
from paceline.train.packing import Geometry, Packer
from paceline.train.run import open_run
from paceline.train.settings import FREE, PER_CALL, TrainSettings, as_json
from paceline.train.settle import settle
from paceline.train.shards import Shards
from paceline.train.stages import make_trainer
from paceline.train.target import target_info
from paceline.train.train_dflash import METHOD
from tests.unit.train.making import DECAY, new_net, random_docs, write_docs

FLAGS = [
    *("--answer-tokens", "500", "--max-new-tokens", "12", "--max-prompt-tokens", "90"),
    *(
        "--held-out",
        "0.3",
        "--own-share",
        "0.2",
        "--max-rows",
        "4",
        "--layers",
        "1",
        "--block",
        "4",
    ),
    *("--taps", "0", "2", "--mask-token", "90", "--row-tokens", "96", "--batch-rows", "1"),
    *("--anchors", "8", "--warmup", "2", "--evals", "1", "--eval-docs", "4", "--log-steps", "2"),
    *("--engine-prompts", "3", "--device", "cpu"),
]


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty short prompts and a broken line."""
    lines = [
        json.dumps({"messages": [{"role": "user", "content": f"say {i} and"}], "source": "s"})
        for i in range(30)
    ]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join([*lines, "{"]))
    return path


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The entry sets the root logger's level."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def words(target_folder: Path, prompt_file: Path, run: Path, *more: str) -> list[str]:
    base = ["dflash", str(run), "--model", str(target_folder), "--prompts", str(prompt_file)]
    return [*base, *FLAGS, *more]


def test_a_run_from_prompts_to_export(
    tmp_path: Path, target_folder: Path, prompt_file: Path, target: LoadedModel
) -> None:
    """Stages one by one and at once; what is exported loads back and says where it came from."""
    run = tmp_path / "run"
    arguments = words(target_folder, prompt_file, run, "--steps", "6", "--broken", "skip")
    assert main([*arguments, "--stages", "prepare", "generate"]) == 0
    answers = Shards(run / "answers")
    assert answers.num_answer_tokens >= 500
    assert not (run / "state.safetensors").exists()
    assert main(["dflash", str(run)]) == 0, "a second call needs no flags"
    assert len(Shards(run / "answers")) == len(answers), "nothing more was generated"

    export = run / "export"
    names = {p.name for p in export.iterdir()}
    assert names == {"config.json", "model.safetensors", "card.md", "record.json"}
    loaded = dflash_checkpoint.load_plain(export, target_info(target.net), dtype=torch.bfloat16)
    best = dflash_checkpoint.load_plain(run / "best", target_info(target.net), dtype=torch.bfloat16)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, best.state_dict()[name]), name
    record = json.loads((export / "record.json").read_text())
    kinds = [line["kind"] for line in record["curve"]]
    assert kinds == ["train", "train", "train", "held_out", "engine"]
    assert record["engine"]["best"] >= 1.0
    assert record["settings"]["steps"] == 6
    card = (export / "card.md").read_text()
    for text in ("block 4", "taps 0, 2", "mask token 90", "| s (not stated) | 30 |"):
        assert text in card
    assert str(tmp_path) not in card
    assert main(["dflash", str(run), "--steps", "8", "--stages", "train"]) == 0
    curve = (run / "curve.jsonl").read_text().splitlines()
    assert json.loads(curve[-2])["step"] == 8


def test_exported_logits_are_the_trained_ones(tmp_path: Path, target: LoadedModel) -> None:
    """Through the public format and back: equal block logits, in float64 to the last bit."""
    net = new_net(target)
    dflash_checkpoint.save(net, tmp_path / "drafter", dtype=torch.float64)
    info = target_info(target.net)
    back = dflash_checkpoint.load_plain(tmp_path / "drafter", info, dtype=torch.float64)
    shards = write_docs(tmp_path / "docs", random_docs(9))
    batch = Packer(shards, Geometry(rows=1, row_tokens=64, anchors=5, targets=4), 0).batch(0)
    one, two = (DFlashTask(target.net, n, DECAY).hidden(batch) for n in (net, back))
    assert torch.equal(one, two)
    assert torch.equal(net.logits(one.flatten(0, 1)), back.logits(two.flatten(0, 1)))


def test_time_that_is_up_stops_every_stage(
    tmp_path: Path, target_folder: Path, prompt_file: Path
) -> None:
    """Exit code 3, and the same command goes on until it is complete."""
    run = tmp_path / "run"
    arguments = words(target_folder, prompt_file, run, "--steps", "4", "--broken", "skip")
    codes = [main([*arguments, "--minutes", "0.0001"])]
    codes.append(main([*arguments, "--minutes", "0.0001"]))
    assert codes == [3, 3]
    assert main(arguments) == 0
    assert (run / "export" / "card.md").is_file()


def test_broken_lines_are_refused_before_anything_is_computed(
    tmp_path: Path, target_folder: Path, prompt_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Exit code 2 and the line's number."""
    run = tmp_path / "run"
    assert main(words(target_folder, prompt_file, run, "--steps", "4")) == 2
    assert "prompts.jsonl:31: no JSON" in caplog.text
    assert not (run / "prompts").exists()


def test_the_command_line_with_bars_is_the_same(
    tmp_path: Path, target_folder: Path, prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`paceline train dflash` takes the same flags and obeys the same rules."""
    run = tmp_path / "run"
    arguments = words(target_folder, prompt_file, run, "--steps", "4", "--broken", "skip")
    assert paceline(["train", *arguments, "--stages", "prepare"]) == 0
    assert "complete: prepare" in capsys.readouterr().err
    stored = json.loads((run / "settings.json").read_text())
    assert stored["taps"] == [0, 2]
    assert paceline(["train", *arguments[:2], "--layers", "3"]) == 2
    assert "layers was 1, now 3" in capsys.readouterr().err
    assert paceline(["train", *arguments[:2], "--minutes", "0.00001"]) == 3
    assert "the same command goes on" in capsys.readouterr().err


def test_flags_are_the_fields() -> None:
    """Every field has a flag in the plain parser, with the field's type; none given, none passed."""
    given = vars(parser().parse_args(["dflash", "r"]))
    assert set(given) == {"method", "run"}
    given = vars(
        parser().parse_args(
            ["dflash", "r", "--taps", "1", "2", "--no-compile", "--loss", "dpace", "--lr", "0.1"]
        )
    )
    assert given["taps"] == (1, 2)
    assert given["compile"] is False
    assert (given["loss"], given["lr"]) == ("dpace", 0.1)
    assert {f.name for f in fields(TrainSettings)} >= FREE | PER_CALL


def test_settings_are_kept_and_guarded(tmp_path: Path) -> None:
    """What may change changes; what may not is refused by name; a damaged file is said."""
    first = settle(
        tmp_path / "r",
        {"own_share": 1.0, "steps": 5, "taps": (1, 2), "minutes": 3.0},
        DFlashSettings,
    )
    assert settle(tmp_path / "r", {}, DFlashSettings) == DFlashSettings(
        own_share=1.0, steps=5, taps=(1, 2)
    )
    assert first.minutes == 3.0
    later = settle(tmp_path / "r", {"train_minutes": 2.0}, DFlashSettings)
    assert (later.steps, later.train_minutes) == (None, 2.0)
    with pytest.raises(ConfigError, match=r"--taps was \(1, 2\), now \(3,\); only --answer-tokens"):
        settle(tmp_path / "r", {"taps": (3,)}, DFlashSettings)
    (tmp_path / "r" / "settings.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        settle(tmp_path / "r", {}, DFlashSettings)
    (tmp_path / "r" / "settings.json").write_text('{"unknown": 1}')
    with pytest.raises(ConfigError, match="is damaged"):
        settle(tmp_path / "r", {}, DFlashSettings)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "give either --steps or --train-minutes"),
        ({"steps": 3, "train_minutes": 1.0}, "give either --steps or --train-minutes"),
        ({"steps": 3, "own_share": 0.5, "prompts": ()}, "give --prompts, or --own-share 1"),
        ({"steps": 3, "block": 1}, "--block 1 must be >= 2"),
        ({"steps": 3, "held_out": 0.0}, "--held-out 0.0 must be between 0 and 1"),
        ({"steps": 3, "temperatures": (-1.0,)}, "temperatures"),
        ({"steps": 3, "stages": ("cook",)}, "are none of prepare"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    """All problems at once, before anything is loaded."""
    with pytest.raises(ConfigError, match=message):
        DFlashSettings(**{"own_share": 1.0, **options}).check()
    assert set(as_json(DFlashSettings())) == {f.name for f in fields(DFlashSettings)}


def test_stages_that_lack_what_they_need_say_so(
    tmp_path: Path, target_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No prompts, no answers, no drafter: each has a message."""
    run = ["dflash", str(tmp_path / "run"), "--model", str(target_folder), "--device", "cpu"]
    run += ["--own-share", "1", "--steps", "2"]
    for stage, message in (
        ("generate", "run the stage 'prepare' first"),
        ("train", "nothing to train on"),
        ("finish", "run the stage 'train' first"),
    ):
        caplog.clear()
        assert main([*run, "--stages", stage]) == 2
        assert message in caplog.text


def test_the_mask_is_a_token_that_text_has_not(target: LoadedModel) -> None:
    """Special, in no chat, no end of text, with an embedding; else --mask-token is asked for."""

    class Words:
        special_ids = frozenset({0, 1, 2, 50, 60})
        eos_token_ids = (2,)

        @staticmethod
        def encode_chat(_: object) -> list[int]:
            return [1, 60, 5]

    assert choose_mask_token(Words(), target.net) == 50
    with pytest.raises(ConfigError, match="--mask-token"):
        choose_mask_token(type("W", (Words,), {"special_ids": frozenset({1, 2})})(), target.net)


def test_taps_beyond_the_target_are_refused(target: LoadedModel) -> None:
    """The message has the layers that there are."""
    with pytest.raises(
        ConfigError, match=r"layers \[3\] do not exist; the target has layers 0 to 2"
    ):
        new_config(DFlashSettings(taps=(1, 3)), target.config, 90)


def test_drafters_that_training_does_not_know_are_refused(target: LoadedModel) -> None:
    """A selector or a cap would be trained wrongly, or not at all."""
    net = new_net(target)
    net.config = replace(net.config, logit_softcap=30.0, selector=SelectorConfig(rank=4, top_k=2))
    with pytest.raises(ConfigError, match=r"caps its logits and has a candidate selector"):
        DFlashTask(target.net, net, DECAY)


def test_compiled_networks_are_one_graph_each(
    tmp_path: Path, target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile follows target and drafter without a break, and the loss is the same."""
    compile_ = torch.compile

    def whole(function: Callable[..., Any], **options: Any) -> Any:
        return compile_(function, backend="eager", fullgraph=True, **options)

    monkeypatch.setattr(torch, "compile", whole)
    shards = write_docs(tmp_path / "docs", random_docs(9))
    batch = Packer(shards, Geometry(rows=1, row_tokens=64, anchors=5, targets=4), 0).batch(0)
    plain = DFlashTask(target.net, new_net(target), DECAY)
    compiled = DFlashTask(target.net, new_net(target), DECAY, compiled=True)
    torch.testing.assert_close(compiled.loss(batch), plain.loss(batch))
    assert torch.equal(compiled.matches(batch), plain.matches(batch))


def test_fine_tuning_starts_from_the_drafter_given(
    tmp_path: Path, target_folder: Path, prompt_file: Path, target: LoadedModel
) -> None:
    """--init: shape and weights of the first step are the old drafter's."""
    net = new_net(target)
    dflash_checkpoint.save(net, tmp_path / "old", dtype=torch.float64)
    run = tmp_path / "run"
    more = (
        "--init",
        str(tmp_path / "old"),
        "--steps",
        "2",
        "--broken",
        "skip",
        "--dtype",
        "float64",
    )
    arguments = words(target_folder, prompt_file, run, *more)
    assert main([*arguments, "--stages", "prepare", "generate"]) == 0
    given = vars(parser().parse_args(arguments))
    opened = open_run(
        DFlashSettings,
        run,
        {k: v for k, v in given.items() if k not in ("run", "method")},
        Tokenizer.from_files,
        print,
        "",
    )
    trainer = make_trainer(opened, METHOD)
    found = trainer._parts.task.net.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in net.state_dict().items())


def test_a_drafter_is_exported_even_if_the_engine_fails(
    tmp_path: Path, target_folder: Path, prompt_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What training has cost is not lost with the measurement."""
    run = tmp_path / "run"
    arguments = words(target_folder, prompt_file, run, "--steps", "2", "--broken", "skip")

    def broken(*_: object) -> float:
        raise RuntimeError

    monkeypatch.setattr(finishing, "measured", broken)
    with pytest.raises(RuntimeError):
        main(arguments)
    assert "Not measured in the engine." in (run / "export" / "card.md").read_text()
