"""tools/venv.sh: the first thing that a stranger's machine runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "venv.sh"

if shutil.which("sh") is None:  # pragma: no cover
    pytest.skip("needs a POSIX shell", allow_module_level=True)


def interpreter(folder: Path, name: str, body: str) -> Path:
    """A pretended Python: a shell script."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def make(tmp_path: Path, *python: str) -> tuple[int, str, Path]:
    """Run the script with nothing but the pretended Pythons on the path."""
    tools = tmp_path / "bin"
    for name in ("sh", "rm", "cat"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    folder = tmp_path / "venv"
    ran = subprocess.run(
        [str(tools / "sh"), str(SCRIPT), str(folder), *python],
        env={**os.environ, "PATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ran.returncode, ran.stdout + ran.stderr, folder


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def test_no_venv_module_is_said(tmp_path: Path, bin_folder: Path) -> None:
    """Debian's python3 comes without venv: the message names the package, nothing stays behind."""
    body = f'case "$2" in *ensurepip*) exit 1;; *) exec {sys.executable} "$@";; esac'
    interpreter(bin_folder, "python3", body)
    code, said, folder = make(tmp_path)
    assert code == 1
    assert "venv or ensurepip is missing" in said
    assert "apt-get install python3-venv" in said
    assert "python3.12: not found" in said, "every candidate is accounted for"
    assert not folder.exists()


def test_an_old_python_is_passed_over(tmp_path: Path, bin_folder: Path) -> None:
    """A system's Python 3.9 does not end it: the next candidate is taken."""
    old = 'case "$2" in *sys.exit*) exit 1;; *) echo 3.9;; esac'
    interpreter(bin_folder, "python3", old)
    works = 'if [ "$1" = -m ]; then for last; do :; done; : >"$last"; fi; echo 3.12'
    interpreter(bin_folder, "python3.12", works)
    code, said, folder = make(tmp_path)
    assert code == 0, said
    assert "with python3.12" in said
    assert folder.exists()


def test_a_failed_venv_leaves_nothing(tmp_path: Path, bin_folder: Path) -> None:
    """Half an environment would be taken for a whole one by the next make."""
    body = 'if [ "$1" = -m ]; then for last; do :; done; : >"$last"; exit 1; fi; echo 3.12'
    interpreter(bin_folder, "mine", body)
    code, said, folder = make(tmp_path, "mine")
    assert code == 1
    assert "'python -m venv' failed" in said
    assert not folder.exists()
