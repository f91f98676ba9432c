"""Runs a file of tests/interpreted in Triton's interpreter, in a process of its own; no tests here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
linux = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")


def passes(name: str) -> None:
    """Assert that all tests of tests/interpreted/`name`.py pass, and that there are some.

    The interpreter must be on before Triton is imported, hence the process.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"tests/interpreted/{name}.py",
        ],
        cwd=ROOT,
        # None of pytest's plugins is wanted there, and importing them takes as long as importing PyTorch.
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout
