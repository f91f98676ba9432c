"""The record of a run: one JSON object a line, appended as it happens.

Kinds of lines: "train" (loss, learning rate, speed), "held_out" (accept length read off held-out answers)
and "engine" (accept length measured by the engine). A resumed run drops the lines of steps that it will
take again.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError
from paceline.models.atomic import replacing

if TYPE_CHECKING:
    from paceline.train.progress import Progress
    from paceline.train.state import Journey

log = logging.getLogger(__name__)


class Curve:
    """A run's lines.

    Args:
        path: the file; made when the first line comes.
        step: last step that is kept.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        lines = read(path)
        kept = [line for line in lines if _step(line) <= step]
        if len(kept) < len(lines):
            with replacing(path) as file:
                file.write(b"".join(_encode(line) for line in kept))

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self._path.parent

    def add(self, kind: str, step: int, **values: object) -> None:
        """Append a line; a full disk costs the line and nothing else."""
        try:
            with self._path.open("ab") as file:
                file.write(_encode({"kind": kind, "step": step, **values}))
        except OSError as error:
            log.warning("a line of %s is lost: %s", self._path, error)


class TrainLines:
    """Lines about training itself, with the speed since the last one.

    Args:
        curve: where they go.
        progress: who is told too.
        journey: at the start of the call.
    """

    def __init__(self, curve: Curve, progress: Progress, journey: Journey) -> None:
        self._curve, self._progress = curve, progress
        self._seconds, self._anchors = journey.seconds, journey.num_anchors

    def show(self, journey: Journey, loss: float, norm: float, lr: float) -> None:
        """Append a line.

        Raises:
            PacelineError: the loss is not a number any more.
        """
        if not math.isfinite(loss):
            msg = (
                f"the loss of step {journey.step} is {loss}; training cannot go on from here, and a "
                "run's settings are fixed. Begin in a new folder, with a lower --lr or --dtype float32, "
                f"and --answers {self._curve.folder} to train on the same answers."
            )
            raise PacelineError(msg)
        rate = (journey.num_anchors - self._anchors) / max(journey.seconds - self._seconds, 1e-9)
        self._seconds, self._anchors = journey.seconds, journey.num_anchors
        self._curve.add(
            "train",
            journey.step,
            loss=round(loss, 6),
            norm=round(norm, 4),
            lr=lr,
            anchors_per_second=round(rate),
            seconds=round(journey.seconds, 1),
        )
        note = f"loss {loss:.3f}, lr {lr:.2e}, {rate:,.0f} anchors/s"
        self._progress("train", journey.step, journey.steps or 0, note)


def read(path: Path) -> list[dict[str, object]]:
    """All lines that are whole; a killed writer may have left part of one."""
    try:
        texts = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found


def _step(line: dict[str, object]) -> int:
    value = line.get("step")
    return value if isinstance(value, int) else 0


def _encode(line: dict[str, object]) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"
