"""A GPU's clock and power during a run, as nvidia-smi prints them."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest
import torch

from paceline.bench.clocks import Clocks, clocks_of, watch

LINES = """1980, 120.50, 700.00, Not Active
1980, 640.00, 700.00, Not Active
1605, 692.10, 700.00, Active
1590, 694.50, 700.00, Active
1575, 695.
"""


def test_medians_of_the_second_half() -> None:
    """What the GPU does when it is warm; a line that was cut off is none."""
    assert clocks_of(LINES) == Clocks(
        sm_mhz=1597.5, watts=693.3, limit_watts=700.0, power_capped=1.0
    )
    assert clocks_of("1980, 120.50, [N/A], Not Active\n\n") is None
    assert clocks_of("") is None


def test_the_run_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is started before and ended after; whatever the run raises passes."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho '1980, 300, 700, Not Active'\necho '1900, 310, 700, Active'\nexec sleep 60\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    ran = []

    def run() -> None:
        ran.append(1)
        time.sleep(0.3)

    found = watch(torch.device("cuda", 1), run)
    assert ran == [1]
    assert found == Clocks(sm_mhz=1900, watts=310, limit_watts=700, power_capped=1.0)

    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        watch(torch.device("cuda"), fails)


def test_without_the_program_it_runs_unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run takes place all the same."""
    monkeypatch.setenv("PATH", "")
    ran = []
    assert watch(torch.device("cuda"), lambda: ran.append(1)) is None
    assert ran == [1]
