"""A tiny target and a drafter for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline import models
from paceline.draft.dflash_net import DFlashNet
from paceline.models import LoadedModel
from tests import tiny
from tests.unit.train.making import new_net


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of three layers."""
    folder = tmp_path_factory.mktemp("target")
    return tiny.write_tiny(folder, "llama", seed=3, num_hidden_layers=3)


@pytest.fixture(scope="session")
def target(target_folder: Path) -> LoadedModel:
    """The same, loaded in float64."""
    return models.load(
        models.resolve(str(target_folder)),
        device=torch.device("cpu"),
        dtype=torch.float64,
        weights="bf16",
    )


@pytest.fixture
def net(target: LoadedModel) -> DFlashNet:
    """A drafter with first weights."""
    return new_net(target)
