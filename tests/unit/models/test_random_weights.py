"""Random weights: from a configuration alone, the same for the same seed, and of a scale that computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline import models
from paceline.core.errors import ModelError
from paceline.models import LoadedModel
from tests import dense, tiny

ARCHITECTURES = ("llama", "llama-tied", "llama-biases", "qwen2", "qwen3", "mistral")


def made(tmp_path: Path, variant: str, seed: int = 0) -> LoadedModel:
    """A model from a folder that holds a config.json and nothing else."""
    whole = tiny.write_variant(tmp_path / f"{variant}-whole", variant)
    alone = tmp_path / f"{variant}-alone"
    alone.mkdir(exist_ok=True)
    (alone / "config.json").write_text((whole / "config.json").read_text())
    return models.load_random(
        models.resolve(str(alone)),
        device=torch.device("cpu"),
        dtype=torch.float32,
        weights="bf16",
        seed=seed,
    )


@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_every_architecture_needs_its_configuration_only(tmp_path: Path, variant: str) -> None:
    """Every parameter is filled, with finite numbers, and the logits have a trained model's scale."""
    loaded = made(tmp_path, variant)
    for name, value in loaded.net.named_parameters():
        assert value.device.type == "cpu", name
        assert bool(value.isfinite().all()), name
    logits = dense.logits(loaded.net, torch.arange(3, 40).tolist())
    assert 0.5 < float(logits.std()) < 8.0
    assert "random" in loaded.notes[0]


def test_the_seed_decides(tmp_path: Path) -> None:
    """Two runs measure the same network; another seed is another one."""
    first, again, other = (made(tmp_path, "qwen3", seed) for seed in (1, 1, 2))
    mine, same, its = (dense.logits(m.net, [5, 6, 7]) for m in (first, again, other))
    assert torch.equal(mine, same)
    assert not torch.allclose(mine, its, atol=0.1)


def test_a_configuration_without_sense_is_refused(tmp_path: Path) -> None:
    """As where weights are loaded."""
    folder = tiny.write_tiny(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    with pytest.raises(ModelError, match="hidden_act"):
        models.load_random(
            models.resolve(str(folder)),
            device=torch.device("cpu"),
            dtype=torch.float32,
            weights="bf16",
            seed=0,
        )
