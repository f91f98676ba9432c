"""What a GPU's clock and power are while something runs.

Its ceilings hold at its highest clock. Under long products it draws all the power that it may, and then it
lowers the clock: one H200 from 1,980 to below 1,600 MHz at 700 W, so what is bound by computing takes a
quarter longer than the ceilings say, whoever computes it.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_FIELDS = "clocks.sm,power.draw.instant,power.limit,clocks_event_reasons.sw_power_cap"
_EVERY_MS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Medians over a run."""

    sm_mhz: float
    watts: float
    limit_watts: float
    power_capped: float  # share of the samples in which the clock was lowered for the power's sake


def watch(device: torch.device, run: Callable[[], object]) -> Clocks | None:
    """Run something and look at a GPU meanwhile; None where nobody says.

    Looking may disturb: nothing that is timed should run in here.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        run()
        return None
    command = [
        program,
        f"--id={device.index or 0}",
        f"--query-gpu={_FIELDS}",
        "--format=csv,noheader,nounits",
        f"--loop-ms={_EVERY_MS}",
    ]
    watcher = subprocess.Popen(  # noqa: S603 (nvidia-smi, with fixed arguments)
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        run()
    finally:
        watcher.terminate()
        text, _ = watcher.communicate()
    return clocks_of(text)


def clocks_of(text: str) -> Clocks | None:
    """Read what nvidia-smi printed, a sample a line; None if no line is whole.

    The first half is left out: the GPU comes from rest.
    """
    samples = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 4:
            continue
        try:
            numbers = [float(cell) for cell in cells[:3]]
        except ValueError:  # "[N/A]" on some GPUs, or a line that was cut off
            continue
        samples.append((*numbers, cells[3] == "Active"))
    if not samples:
        return None
    mhz, watts, limits, capped = zip(*samples[len(samples) // 2 :], strict=True)
    return Clocks(
        sm_mhz=statistics.median(mhz),
        watts=statistics.median(watts),
        limit_watts=statistics.median(limits),
        power_capped=round(statistics.fmean(capped), 3),
    )
