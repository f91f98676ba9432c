"""tools/sanitize.py with a stand-in for compute-sanitizer: what it makes of what a tool says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
QUIET = "echo '========= ERROR SUMMARY: 0 errors'"
CLEAN = f"echo '1 passed in 2.1s'; {QUIET}"
SKIPPED = f"echo '1 skipped in 0.4s'; {QUIET}"
FOUND = "echo '========= ERROR SUMMARY: 2 errors'; exit 9"
ORDINARY = f'case "$*" in *out_of_bounds*) {FOUND};; *) {CLEAN};; esac'


def ran(folder: Path, script: str, *more: str) -> subprocess.CompletedProcess[str]:
    """The tool, where compute-sanitizer is that script."""
    place = folder / "bin" / "compute-sanitizer"
    place.parent.mkdir()
    place.write_text(f"#!/bin/sh\n{script}\n")
    place.chmod(0o755)
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "sanitize.py"), "products", "picks", *more],
        env={"CUDA_HOME": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.parametrize(
    "script,more,code,said",
    [
        (ORDINARY, ("--tool", "memcheck"), 0, ["ok   memcheck   products", "3 of 3 runs"]),
        (CLEAN, ("--tool", "memcheck"), 1, ["BAD  memcheck   control", "2 of 3 runs"]),
        (FOUND, ("--tool", "memcheck"), 1, ["BAD  memcheck   picks", "2 errors", "1 of 3 runs"]),
        (
            "echo '= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)'",
            ("--tool", "racecheck"),
            1,
            ["BAD  racecheck  products", "3 errors", "0 of 2 runs"],
        ),
        (f"{CLEAN}; exit 1", ("--tool", "racecheck"), 1, ["0 errors, and the test failed"]),
        ("true", ("--tool", "racecheck"), 1, ["no summary", "0 of 2 runs"]),
        (SKIPPED, ("--tool", "racecheck"), 1, ["BAD", "0 errors, and no test ran", "0 of 2 runs"]),
        (CLEAN, ("--jobs", "0"), 2, ["--jobs 0", "1 or more"]),
        ("sleep 60", ("--tool", "racecheck", "--limit", "0.3"), 1, ["not done in time"]),
        (CLEAN, ("else",), 2, ["there is no part else"]),
    ],
    ids=[
        "clean",
        "blind",
        "found",
        "race",
        "failed",
        "silent",
        "skipped",
        "jobs",
        "late",
        "unknown",
    ],
)
def test_verdicts(
    tmp_path: Path, script: str, more: tuple[str, ...], code: int, said: list[str]
) -> None:
    """Nothing passes but a tool that finds what is planted, and then nothing in tests that pass."""
    done = ran(tmp_path, script, *more)
    assert done.returncode == code, done.stdout + done.stderr
    for words in said:
        assert words in done.stdout
