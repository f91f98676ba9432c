"""Files and names that nobody means to use: one ModelError, never another exception or a hang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline import models
from paceline.core.errors import ModelError
from paceline.models.source import resolve
from tests.tiny import write_tiny
from tests.tiny_gguf import write_tiny_gguf

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))


DEEP = "[" * 100_000
ROPE = {"rope_theta": 10_000.0, "original_max_position_embeddings": 64, "factor": 4.0}


def load(folder: Path) -> None:
    models.load(resolve(str(folder)), device=CPU, dtype=torch.float32, weights="bf16")


CONFIGS = {
    "more layers than tensors": {"num_hidden_layers": 10**7},
    "positions beyond memory": {"max_position_embeddings": 2 * 10**9, "head_dim": 512},
    "positions beyond 64 bits": {"max_position_embeddings": 10**30},
    "vocabulary beyond 64 bits": {"vocab_size": 10**30},
    "hidden size beyond 64 bits": {"hidden_size": 10**25},
    "epsilon below 0": {"rms_norm_eps": -1},
    "theta 0": {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
    "theta below 0": {"rope_parameters": {"rope_type": "default", "rope_theta": -5.0}},
    "yarn with theta 1": {"rope_parameters": ROPE | {"rope_type": "yarn", "rope_theta": 1.0}},
    "yarn's length below 0": {
        "rope_parameters": ROPE | {"rope_type": "yarn", "original_max_position_embeddings": -3}
    },
    "llama3 without a low factor": {
        "rope_parameters": ROPE | {"rope_type": "llama3", "low_freq_factor": 0}
    },
    "llama3 without a high factor": {
        "rope_parameters": ROPE | {"rope_type": "llama3", "high_freq_factor": -1.0}
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_that_cannot_be_meant_are_refused(tmp_path: Path, name: str) -> None:
    """A config's absurd numbers are named before memory is asked for."""
    write_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        load(tmp_path)


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "model.safetensors.index.json"]
)
def test_json_nested_without_end_is_refused(tmp_path: Path, file: str) -> None:
    """JSON deeper than the parser's stack is damage like any other."""
    write_tiny(tmp_path)
    (tmp_path / file).write_text(DEEP)
    with pytest.raises(ModelError, match=file):
        load(tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000, "~no-such-account/x", "a\0b"])
def test_names_that_the_system_refuses_are_unknown_models(name: str) -> None:
    """A name that can't be a path gets the list of what is possible."""
    with pytest.raises(ModelError, match="Possible are"):
        resolve(name)


def test_links_in_a_circle_are_unknown_models(tmp_path: Path) -> None:
    """A symbolic link to itself is no model."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ModelError, match="Possible are"):
        resolve(str(tmp_path / "loop"))


def test_a_gguf_projection_of_broken_shape_is_refused(tmp_path: Path) -> None:
    """Rows that are no whole heads are found before the tensor is reordered."""
    keys = {"attention.head_count": 48, "attention.key_length": 16, "attention.value_length": 16}
    file = write_tiny_gguf(tmp_path / "m.gguf", write_tiny(tmp_path / "m"), keys=keys)
    with pytest.raises(ModelError, match="can't be"):
        load(file)
