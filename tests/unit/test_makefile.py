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
