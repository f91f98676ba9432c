"""What "auto" is, and which folder a network without one gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.config import DraftConfig
from paceline.draft import shipped
from paceline.draft.shipped import Shipped
from paceline.engine.choice import choose_drafter
from paceline.models.source import ModelFiles

HERE = Path(__file__)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelFiles:
    """A target for which one drafter comes with the project."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF and more")
    digest = "1" * 64
    monkeypatch.setattr("paceline.engine.choice.digest", lambda p: digest if p == path else "0")
    monkeypatch.setattr(
        shipped,
        "find",
        lambda sha: (
            [Shipped(target="it", sha256=sha, folder=HERE, methods=("ddtree", "dflash"))]
            if sha == digest
            else []
        ),
    )
    return ModelFiles(name="m", path=path, kind="gguf")


def test_auto_is_the_target_s_own_drafter_and_else_the_suffix_tree(files: ModelFiles) -> None:
    """The best that was trained on this file; a model in a folder, or another file, has none."""
    chosen, notes = choose_drafter(DraftConfig(), files)
    assert (chosen.method, chosen.model) == ("ddtree", str(HERE))
    assert "trained on it" in notes[0]
    other = ModelFiles(name="o", path=Path("other.gguf"), kind="gguf")
    folder = ModelFiles(name="f", path=HERE.parent, kind="folder")
    for target in (other, folder):
        assert choose_drafter(DraftConfig(), target) == (DraftConfig(method="suffix"), ())


def test_a_network_without_a_folder_gets_the_one_that_comes_along(files: ModelFiles) -> None:
    """For a method that can use it; a folder that was named, and host drafters, stay as they are."""
    chosen, _ = choose_drafter(DraftConfig(method="dflash"), files)
    assert (chosen.method, chosen.model) == ("dflash", str(HERE))
    for config in (
        DraftConfig(method="eagle3"),
        DraftConfig(method="dflash", model="mine"),
        DraftConfig(method="ngram"),
        DraftConfig(method="none"),
    ):
        assert choose_drafter(config, files) == (config, ())
