"""Kernels compile for a GPU, on a machine that has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreter import ROOT, linux
from tools import sanitize


@pytest.mark.slow
@linux
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """What the interpreter takes, the compiler takes; overlapping launches included."""
    done = subprocess.run(
        [sys.executable, "-O", "-m", "tests.compile_all"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == []
    assert found["left_out"] == []
    assert found["kernels"] > 40
    assert tuple(found["parts"]) == sanitize.PARTS, "what a GPU's tools watch is all that there is"
