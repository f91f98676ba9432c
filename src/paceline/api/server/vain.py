"""Vain: whether drafts are made in vain, as answers show it; a gauge, not a verdict.

A drafter that is right too rarely costs its own time and the verify of its nodes, and nothing else shows
it. What a grammar forces is no merit of the drafter, so neither these tokens nor the steps that held
nothing else are counted.

Not for: whether a drafter network belongs to its model, which the engine judges (engine/alarm.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.core.request import RequestStats

STEPS = 256  # row-steps with the drafter's own nodes over which it is judged
LENGTH = 1.05  # an accept length below this pays for no draft


class Vain:
    """`now`, by windows of whole answers that hold `STEPS` row-steps or more together."""

    def __init__(self) -> None:
        self.now = False
        self._steps = self._accepted = 0  # of the window so far

    def saw(self, stats: RequestStats) -> None:
        """An answer is whole."""
        self._steps += stats.num_drafter_steps
        self._accepted += stats.num_accepted - stats.num_forced
        if self._steps >= STEPS:
            self.now = 1.0 + self._accepted / self._steps < LENGTH
            self._steps = self._accepted = 0
