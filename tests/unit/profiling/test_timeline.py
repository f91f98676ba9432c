"""The listener of a step's parts."""

from __future__ import annotations

import time

import torch

from paceline.profiling.timeline import Timeline


def test_seconds_are_summed_by_part() -> None:
    """Parts of one name add up, parts within others count in both, and reading starts anew."""
    timeline = Timeline(torch.device("cpu"))
    for _ in range(2):
        with timeline("outer"), timeline("inner"):
            time.sleep(0.01)
    found = timeline.read()
    assert list(found) == ["inner", "outer"]
    assert 0.02 <= found["inner"] <= found["outer"] < 0.5
    assert timeline.read() == {}
