"""A run's folder: one training at a time, and no settings of a first call that was refused."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.cli import main as paceline
from paceline.core.errors import ConfigError, ModelError, PacelineError
from paceline.train import state as states
from paceline.train.__main__ import main
from paceline.train.claim import claimed
from paceline.train.curve import Curve, TrainLines
from paceline.train.dflash_settings import DFlashSettings
from paceline.train.state import Journey


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The entry sets the root logger's level."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def prompts(folder: Path, text: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text(text)
    return path


GOOD = json.dumps({"messages": [{"role": "user", "content": "say"}]})
REFUSED = {
    "mask": (GOOD, ["--mask-token", "999999"], "mask token 999999 is no token"),
    "negative mask": (GOOD, ["--mask-token", "-1"], "mask token -1 is no token"),
    "taps": (GOOD, ["--taps", "99"], r"layers [99] do not exist"),
    "empty prompts": ("", ["--mask-token", "90", "--own-share", "0"], "no lines"),
    "long prompts": (GOOD, ["--max-prompt-tokens", "1"], "longer than 1 tokens"),
    "init": (GOOD, ["--init", "missing"], "config.json"),
}


@pytest.mark.parametrize("entry", [main, lambda words: paceline(["train", *words])])
@pytest.mark.parametrize("text, more, message", REFUSED.values(), ids=REFUSED)
def test_a_refused_first_call_leaves_nothing(
    tmp_path: Path,
    target_folder: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    entry: object,
    text: str,
    more: list[str],
    message: str,
) -> None:
    """Neither settings, which would bind the next call, nor half-made prompts, nor the folder."""
    assert callable(entry)
    run = tmp_path / "run"
    file = prompts(tmp_path, text)
    words = ["dflash", str(run), "--model", str(target_folder), "--device", "cpu", "--steps", "2"]
    assert entry([*words, "--prompts", str(file), *more]) == 2
    said = caplog.text + capsys.readouterr().err
    assert message in " ".join(said.split())
    assert not run.exists()
    run.mkdir()
    (run / "mine").touch()
    assert entry([*words, "--prompts", str(file), *more]) == 2
    assert [p.name for p in run.iterdir()] == ["mine"], "a folder that was there stays"


def test_eagle3_is_refused_early_too(tmp_path: Path, target_folder: Path) -> None:
    """Taps beyond the target, before a prompt is prepared."""
    words = ["eagle3", str(tmp_path / "run"), "--model", str(target_folder), "--own-share", "1"]
    assert main([*words, "--steps", "2", "--taps", "0", "1", "99", "--device", "cpu"]) == 2
    assert not (tmp_path / "run").exists()


def test_settings_stay_once_something_was_computed(tmp_path: Path, target_folder: Path) -> None:
    """Prepared prompts were made by them; a later refusal forgets nothing."""
    run = tmp_path / "run"
    words = ["dflash", str(run), "--model", str(target_folder), "--device", "cpu", "--steps", "2"]
    words += ["--prompts", str(prompts(tmp_path, GOOD)), "--mask-token", "90", "--taps", "0"]
    assert main([*words, "--stages", "prepare", "train"]) == 2, "nothing to train on"
    assert (run / "settings.json").exists()
    assert (run / "prompts").is_dir()
    assert main(["dflash", str(run), "--layers", "7"]) == 2
    assert (run / "settings.json").exists()


HOLD = """
import sys
from pathlib import Path
from paceline.train.claim import claimed

with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_folder_takes_one_training_at_a_time(tmp_path: Path) -> None:
    """The second process is refused and harms nothing; a killed one leaves no lock."""
    pytest.importorskip("fcntl")
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match=r"another process trains in .*--answers"),
            claimed(run),
        ):
            pass
        assert run.is_dir()
        with claimed(tmp_path / "other"):
            pass
    finally:
        process.kill()
        process.communicate()
    with claimed(run):
        assert not list(run.iterdir()), "no file is left behind"


@pytest.mark.parametrize(
    "name, value",
    [
        ("lr", float("inf")),
        ("lr", 1e30),
        ("lr", float("nan")),
        ("mlp_size", 0),
        ("mlp_size", -64),
        ("weight_decay", -5.0),
        ("weight_decay", float("inf")),
        ("save_minutes", float("nan")),
        ("save_minutes", -1.0),
        ("minutes", float("inf")),
        ("minutes", 0.0),
        ("train_minutes", float("inf")),
        ("generate_minutes", float("nan")),
    ],
)
def test_numbers_without_sense_are_refused(name: str, value: float) -> None:
    """Named, with the value and what is possible."""
    length = {} if name == "train_minutes" else {"steps": 3}
    settings = DFlashSettings(**{"own_share": 1.0, **length, name: value})  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError,
        match=rf"invalid settings: --{name.replace('_', '-')} {re.escape(str(value))} must be ",
    ):
        settings.check()


def test_the_usual_numbers_are_taken() -> None:
    """The limits leave the defaults, none and zero where it means something."""
    DFlashSettings(own_share=1.0, steps=3, minutes=0.5, generate_minutes=0.0, mlp_size=64).check()
    DFlashSettings(own_share=1.0, train_minutes=0.5, save_minutes=0.0, lr=1.0).check()


def test_a_loss_that_is_no_number_names_what_is_possible(tmp_path: Path) -> None:
    """Settings are fixed, so the advice is another folder on the same answers."""
    journey = Journey(step=7)
    lines = TrainLines(Curve(tmp_path / "curve.jsonl", 0), print, journey)
    with pytest.raises(PacelineError, match=rf"new folder.*--answers {tmp_path}"):
        lines.show(journey, float("nan"), 1.0, 0.1)


@pytest.mark.parametrize("read", [states.load, states.load_journey])
def test_a_damaged_state_is_to_be_deleted(tmp_path: Path, read: object) -> None:
    """It was never downloaded."""
    assert callable(read)
    path = tmp_path / "state.safetensors"
    assert states.save(path, {}, Journey())
    assert asdict(states.load_journey(path)) == asdict(Journey())
    path.write_bytes(path.read_bytes()[:-1] + b"x" * 9)
    with pytest.raises(ModelError, match=r"Delete it to start training") as caught:
        read(path)
    assert "Download" not in str(caught.value)
