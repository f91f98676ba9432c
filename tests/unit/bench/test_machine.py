from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

import paceline
from paceline.bench import machine


def test_versions_name_what_decides_results() -> None:
    """A record without versions can't be repeated."""
    found = machine.versions()
    assert found["paceline"] == paceline.__version__
    assert found["torch"] == torch.__version__
    assert found["tokenizers"]


def test_a_missing_package_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages come and go; their absence is a fact to be recorded."""
    monkeypatch.setattr(machine, "_PACKAGES", ("no-such-package-at-all",))
    assert machine.versions()["no-such-package-at-all"] is None


def test_the_machine_is_described() -> None:
    """Processor, cores and memory stand in every record."""
    found = machine.machine(torch.device("cpu"))
    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["free_memory_gb"] > 0
    assert "gpu" not in found


def _git(folder: Path, *arguments: str) -> None:
    name = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", str(folder), *name, *arguments], check=True, capture_output=True)


def test_the_source_is_a_commit_and_whether_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A figure belongs to a commit; uncommitted changes are confessed."""
    monkeypatch.setattr(paceline, "__file__", str(tmp_path / "paceline" / "__init__.py"))
    (tmp_path / "paceline").mkdir()
    (tmp_path / "paceline" / "__init__.py").write_text("")
    assert machine.source() == {"commit": None, "dirty": None}
    _git(tmp_path, "init", "-q")
    (tmp_path / "other").write_text("")
    _git(tmp_path, "add", "other")
    _git(tmp_path, "commit", "-qm", "somebody else's repository")
    assert machine.source() == {"commit": None, "dirty": None}
    _git(tmp_path, "add", "paceline")
    _git(tmp_path, "commit", "-qm", "ours")
    found = machine.source()
    assert re.fullmatch(r"[0-9a-f]{40}", found["commit"])
    assert found["dirty"] is False
    (tmp_path / "paceline" / "__init__.py").write_text("changed")
    assert machine.source()["dirty"] is True
