"""Trainer: the loop. Steps, measurements, saved states, and a clean stop when time is up.

A step is a pure function of the saved state and its number, so a run that was stopped, or killed and
set back to its last saved state, goes on to the same losses.

Not here: what a step computes (`dflash.py`), and in which order stages follow (`run.py`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline.core.errors import ConfigError, PacelineError
from paceline.train import state as states
from paceline.train.curve import Curve, TrainLines
from paceline.train.optimizer import MasterAdamW, learning_rate
from paceline.train.prefetch import Prefetch
from paceline.train.state import Journey

if TYPE_CHECKING:
    from torch import nn

    from paceline.train.accept import HeldOut
    from paceline.train.packing import Batch, Packer
    from paceline.train.progress import Progress
    from paceline.train.settings import TrainSettings

log = logging.getLogger(__name__)

STATE, CURVE = "state.safetensors", "curve.jsonl"
_AHEAD = 2  # steps that may be launched before the oldest has ended
_CALIBRATE = (20, 60)  # steps between which the speed is taken
_RESERVE = 0.95  # of the time left is planned for steps; the rest for measuring and saving


class Task(Protocol):
    """A drafter in training."""

    @property
    def net(self) -> nn.Module:
        """What learns."""
        ...

    def loss(self, batch: Batch) -> Tensor:
        """A scalar with gradients."""
        ...

    def matches(self, batch: Batch) -> Tensor:
        """[S, N] leading drafts that are right."""
        ...


class Saver(Protocol):
    """Writes the drafter as it is now to a folder."""

    def __call__(self, folder: Path) -> None:
        """Replace the folder by the drafter's checkpoint."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a trainer works with."""

    task: Task
    packer: Packer
    held_out: HeldOut
    device: torch.device
    folder: Path  # of the run
    save_drafter: Saver
    data: dict[str, object]  # whose data it is; a resumed run must have the same
    progress: Progress


class Trainer:
    """Runs, or goes on with, the training of one drafter.

    Args:
        parts: what it works with.
        settings: of the run.

    Raises:
        ConfigError: the saved state belongs to other data.
        ModelError: the saved state is damaged.
    """

    def __init__(self, parts: Parts, settings: TrainSettings) -> None:
        self._parts, self._settings = parts, settings
        self._optimizer = MasterAdamW(
            parts.task.net, weight_decay=settings.weight_decay, clip=settings.clip
        )
        found = states.load(parts.folder / STATE)
        self.journey = Journey(data=parts.data) if found is None else found[1]
        if found is not None:
            if self.journey.data != parts.data:
                msg = (
                    f"{parts.folder / STATE} was trained on {self.journey.data}, and now there is "
                    f"{parts.data}; a resumed run needs the same answers. Use another run folder "
                    "with --init for the weights, or delete the state to begin anew."
                )
                raise ConfigError(msg)
            self._optimizer.restore(found[0], self.journey.step)
            log.info("going on from step %d", self.journey.step)
        self._settle_length()
        self._curve = Curve(parts.folder / CURVE, self.journey.step)
        self._events: deque[torch.cuda.Event] = deque()
        self._first = self.journey.step  # of this call
        self._calibrated_from: float | None = None

    @property
    def finished(self) -> bool:
        """Whether all steps are taken."""
        return self.journey.steps is not None and self.journey.step >= self.journey.steps

    def run(self, deadline: float | None) -> bool:
        """Train until all steps are taken, or until the deadline; the state is saved at the end.

        Args:
            deadline: `time.perf_counter()` seconds; None: no limit.

        Returns:
            Whether all steps are taken.

        Raises:
            PacelineError: the loss is not a number any more, or the last state could not be saved.
        """
        started = saved = time.perf_counter()
        before = self.journey.seconds
        lines = TrainLines(self._curve, self._parts.progress, self.journey)
        try:
            with Prefetch(self._parts.packer, self.journey.step, self._parts.device) as batches:
                while not self.finished and (deadline is None or time.perf_counter() < deadline):
                    batch, alive = batches.take()
                    loss, norm = self._step(batch, alive)
                    self.journey.seconds = before + time.perf_counter() - started
                    self._calibrate()
                    if self.journey.step % self._settings.log_steps == 0 or self.finished:
                        lines.show(self.journey, float(loss), float(norm), self._lr())
                    if self._is_eval():
                        self._measure()
                    if time.perf_counter() - saved > 60 * self._settings.save_minutes:
                        self._save()
                        saved = time.perf_counter()
        except KeyboardInterrupt:
            self._save()
            raise
        if not self._save():
            msg = (
                f"training stopped at step {self.journey.step}, but its state could not be saved "
                "(see above); make room on the disk and run the same command again"
            )
            raise PacelineError(msg)
        return self.finished

    # -- parts of a step ----------------------------------------------------------------------

    def _step(self, batch: Batch, alive: int) -> tuple[Tensor, Tensor]:
        loss = self._parts.task.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = self._optimizer.step(self._lr())
        self.journey.step += 1
        self.journey.num_anchors += alive
        if self._parts.device.type == "cuda":  # the host must not run ahead without bound
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
            if len(self._events) > _AHEAD:
                self._events.popleft().synchronize()
        return loss.detach(), norm

    def _lr(self) -> float:
        return learning_rate(
            self.journey.step,
            highest=self._settings.lr,
            warmup=self._settings.warmup,
            steps=self.journey.steps,
        )

    def _is_eval(self) -> bool:
        step, steps, evals = self.journey.step, self.journey.steps, self._settings.evals
        if steps is None or not evals:
            return self.finished
        return any(step == round(steps * i / evals) for i in range(1, evals + 1))

    def _measure(self) -> None:
        """Accept length on held-out answers; the best drafter so far is kept."""
        found = self._parts.held_out.measure(self._parts.task)
        groups = {group: round(length, 4) for group, length in found.by_group.items()}
        self._curve.add(
            "held_out",
            self.journey.step,
            accept_length=round(found.length, 4),
            tokens=found.num_tokens,
            seconds=round(self.journey.seconds, 1),
            by_group=groups,
        )
        log.info("step %d: held-out accept length %.3f", self.journey.step, found.length)
        try:
            self._parts.save_drafter(self._parts.folder / "last")
            if found.length >= self.journey.best_accept:
                self._parts.save_drafter(self._parts.folder / "best")
                self.journey.best_accept = found.length
                self.journey.best_step = self.journey.step
        except OSError as error:
            log.error(  # noqa: TRY400 (the reason says it all)
                "the drafter of step %d could not be saved (%s); earlier ones are kept. Make room "
                "on the disk.",
                self.journey.step,
                error,
            )
        self._save()

    def _save(self) -> bool:
        return states.save(self._parts.folder / STATE, self._optimizer.state(), self.journey)

    # -- how many steps -----------------------------------------------------------------------

    def _settle_length(self) -> None:
        """Steps in all: as asked, or decided before, or not known yet."""
        if self._settings.steps is not None:
            self.journey.steps = self._settings.steps
        elif self._settings.train_minutes != self.journey.minutes:
            self.journey.steps = None
        self.journey.minutes = self._settings.train_minutes

    def _calibrate(self) -> None:
        """Turn minutes into steps, once, when the speed is known."""
        if self.journey.steps is not None or self._settings.train_minutes is None:
            return
        taken = self.journey.step - self._first
        if taken == _CALIBRATE[0]:
            self._calibrated_from = self._now()
        if taken < _CALIBRATE[1] or self._calibrated_from is None:
            return
        each = (self._now() - self._calibrated_from) / (_CALIBRATE[1] - _CALIBRATE[0])
        left = 60 * self._settings.train_minutes - self.journey.seconds
        self.journey.steps = self.journey.step + max(math.floor(_RESERVE * left / each), 1)
        log.info(
            "%.1f ms a step: %d steps in %.1f minutes",
            1e3 * each,
            self.journey.steps,
            self._settings.train_minutes,
        )

    def _now(self) -> float:
        """Seconds, once all launched work has ended."""
        if self._parts.device.type == "cuda":
            torch.cuda.synchronize(self._parts.device)
        return time.perf_counter()
