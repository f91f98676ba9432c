"""The Makefile on machines that lack something: what it says, and that nothing half-made is kept."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

if shutil.which("make") is None:  # pragma: no cover
    pytest.skip("needs make", allow_module_level=True)


def make(
    venv: Path, target: str, pip: str, path: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a target with a pretended environment whose pip does `pip`."""
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    python = venv / "bin" / "python"
    python.write_text(f"#!/bin/sh\n{pip}\n")
    python.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "PIP_"))}
    return subprocess.run(
        ["make", target, f"VENV={venv}"],
        cwd=ROOT,
        env=env | ({} if path is None else {"PATH": path}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("target", ["demo", "test", "lint"])
def test_no_network_is_said(tmp_path: Path, target: str) -> None:
    """The first installation needs it: one message with what to do, and the next try begins anew."""
    ran = make(tmp_path / "venv", target, 'echo "no route to host" >&2; exit 1')
    assert ran.returncode != 0
    assert "no route to host" in ran.stderr
    assert "The first time it needs the network" in ran.stderr
    assert "Run the same command again" in ran.stderr
    assert not (tmp_path / "venv" / ".installed-run").exists()


def hint(tmp_path: Path, *, uname: str = "Linux", python: str = "exit 1", **env: str) -> str:
    """What the hint says on a pretended machine; `python` is what the environment's Python does."""
    tools, venv = tmp_path / "tools", tmp_path / "venv"
    for folder in (tools, venv / "bin"):
        folder.mkdir(parents=True, exist_ok=True)
    scripts = {tools / "uname": f"echo {uname}", venv / "bin" / "python": python}
    if env.pop("gpu", ""):
        scripts[tools / "nvidia-smi"] = "exit 0"
    for path, body in scripts.items():
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    for name in ("sh", "cat", "grep"):
        found = shutil.which(name)
        assert found is not None
        if not (tools / name).exists():
            (tools / name).symlink_to(found)
    ran = subprocess.run(
        [str(tools / "sh"), str(ROOT / "tools" / "pytorch_hint.sh"), str(venv), "test"],
        env={"PATH": str(tools), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stderr == ""
    return ran.stdout


def test_who_needs_the_small_pytorch_is_told_how(tmp_path: Path) -> None:
    """On Linux without a GPU: both commands, ready to be copied, and that nothing depends on it."""
    text = hint(tmp_path)
    assert "PIP_EXTRA_INDEX_URL=ADDRESS make test" in text
    venv = tmp_path / "venv"
    assert f"uv pip install --python {venv}/bin/python --torch-backend cpu -c constraints" in text
    assert "Everything works either way" in text


@pytest.mark.parametrize(
    "machine",
    [
        {"uname": "Darwin"},
        {"gpu": "yes"},
        {"python": 'test "$1" = -c'},  # PyTorch is there
        {"python": 'test "$1" = -m && echo "global.extra-index-url=there"'},
        {"PIP_EXTRA_INDEX_URL": "there"},
        {"PIP_FIND_LINKS": "there"},
    ],
    ids=["a Mac", "a GPU", "installed", "configured", "another index", "wheels at hand"],
)
def test_who_does_not_is_left_in_peace(tmp_path: Path, machine: dict[str, str]) -> None:
    """A hint that does not apply teaches people to read none."""
    assert hint(tmp_path, **machine) == ""
