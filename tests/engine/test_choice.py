"""What "auto" is, and which folder a network without one gets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.config import DraftConfig
from paceline.draft import shipped
from paceline.draft.shipped import Shipped
from paceline.engine.choice import choose_drafter
from paceline.models.source import ModelFiles

HERE, THERE = Path(__file__), Path(__file__).parent / "harness.py"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelFiles:
    """A target for which two drafters come with the project."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF and more")
    digest = "1" * 64
    monkeypatch.setattr("paceline.engine.choice.digest", lambda p: digest if p == path else "0")
    monkeypatch.setattr(
        shipped,
        "find",
        lambda sha: (
            [
                Shipped(target="it", sha256=sha, folder=HERE, methods=("ddtree", "dflash")),
                Shipped(target="it", sha256=sha, folder=THERE, methods=("eagle3",)),
            ]
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


@pytest.mark.parametrize("method, folder", [("dflash", HERE), ("ddtree", HERE), ("eagle3", THERE)])
def test_a_network_without_a_folder_gets_the_one_that_comes_along(
    files: ModelFiles, method: str, folder: Path
) -> None:
    """The first of those that serve the method, which is not always the first of all."""
    chosen, notes = choose_drafter(DraftConfig(method=method), files)
    assert (chosen.method, chosen.model) == (method, str(folder))
    assert f"{method}, with the weights trained on it" in notes[0]


@pytest.mark.parametrize(
    "parts, folder",
    [(("suffix", "ddtree"), HERE), (("dflash", "ngram"), HERE), (("suffix", "eagle3"), THERE)],
)
def test_the_network_in_a_merged_drafter_gets_it_too(
    files: ModelFiles, parts: tuple[str, ...], folder: Path
) -> None:
    """By the one part that needs it, wherever it stands; who else takes part stays as it was."""
    config = DraftConfig(method="merged", parts=parts)
    chosen, notes = choose_drafter(config, files)
    assert chosen == replace(config, model=str(folder))
    assert "merged, with the weights trained on it" in notes[0]


@pytest.mark.parametrize(
    "config",
    [
        DraftConfig(method="dflash", model="mine"),
        DraftConfig(method="merged", parts=("suffix", "eagle3"), model="mine"),
        DraftConfig(method="merged", parts=("ngram", "suffix")),
        DraftConfig(method="ngram"),
        DraftConfig(method="none"),
    ],
    ids=lambda config: config.method,
)
def test_what_needs_no_folder_or_names_one_stays_as_it_is(
    files: ModelFiles, config: DraftConfig
) -> None:
    """Host drafters, alone or merged, and a folder that was named."""
    assert choose_drafter(config, files) == (config, ())


@pytest.mark.parametrize(
    "config",
    [DraftConfig(method="eagle3"), DraftConfig(method="merged", parts=("suffix", "eagle3"))],
    ids=lambda config: config.method,
)
def test_nothing_is_taken_that_does_not_serve_the_method(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, config: DraftConfig
) -> None:
    """Another method's weights are no use; the network says what it needs when it is built."""
    (first, _) = shipped.find("1" * 64)
    monkeypatch.setattr(shipped, "find", lambda _: [first])
    assert choose_drafter(config, files) == (config, ())


def test_the_project_s_own_drafters_are_found_for_their_methods(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each entry of the real index serves the methods it names, the later ones too."""
    index = next(f / "index.json" for f in shipped.folders() if (f / "index.json").is_file())
    monkeypatch.undo()
    for entry in json.loads(index.read_text(encoding="utf-8"))["drafters"]:
        monkeypatch.setattr("paceline.engine.choice.digest", lambda _, e=entry: e["sha256"])
        for method in entry["methods"]:
            for config in (
                DraftConfig(method=method),
                DraftConfig(method="merged", parts=("suffix", method)),
            ):
                chosen, _ = choose_drafter(config, files)
                assert chosen.model == str(index.parent / entry["folder"])
