"""What a configuration alone says is checked at every load, by serving and by training (`--init`) alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.draft import dflash_checkpoint, eagle3_checkpoint
from paceline.draft.base import TargetInfo
from tests import tiny
from tests.dense import target_of
from tests.tiny_drafters import write_dflash
from tests.tiny_eagle3 import write_eagle3

KINDS = {
    "dflash": (write_dflash, dflash_checkpoint),
    "eagle3": (write_eagle3, eagle3_checkpoint),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TargetInfo]:
    """A tiny target."""
    folder = tiny.write_tiny(tmp_path_factory.mktemp("target"), "llama")
    return folder, target_of(folder, torch.float32)[1]


def loaders(kind: str) -> list[Callable[[Path, TargetInfo], object]]:
    """How serving loads, and how training does."""
    module: Any = KINDS[kind][1]
    return [module.load, lambda folder, info: module.load_plain(folder, info, dtype=torch.float32)]


@pytest.mark.parametrize("way", [0, 1], ids=["serving", "training"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_faults_are_listed(
    tmp_path: Path, target: tuple[Path, TargetInfo], kind: str, way: int
) -> None:
    """Another vocabulary and taps beyond the target's layers, in one message."""
    write: Any = KINDS[kind][0]
    taps: dict[str, Any] = {"dflash_config": {"target_layer_ids": [0, 7]}}
    if kind == "eagle3":
        taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}}
    folder = write(tmp_path / "drafter", target[0], vocab_size=98, **taps)
    with pytest.raises(ConfigError) as caught:
        loaders(kind)[way](folder, target[1])
    message = str(caught.value)
    assert "does not belong to this target" in message
    assert "vocabulary: 98 here, 97 in the target" in message
    assert "tapped layers [7]; the target has 0 to 1" in message


@pytest.mark.parametrize("way", [0, 1], ids=["serving", "training"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shorter_length_is_no_warning(
    tmp_path: Path,
    target: tuple[Path, TargetInfo],
    caplog: pytest.LogCaptureFixture,
    kind: str,
    way: int,
) -> None:
    """Published drafters say 2048 and serve longer: for those who look, not for everybody."""
    write: Any = KINDS[kind][0]
    folder = write(tmp_path / "drafter", target[0])
    with caplog.at_level(logging.DEBUG):
        loaders(kind)[way](folder, target[1])
    (note,) = [r for r in caplog.records if "was made for 128 positions" in r.getMessage()]
    assert note.levelno == logging.DEBUG
