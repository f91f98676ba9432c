"""The saved state of a run: one file, replaced in one step, so a killed or failed write leaves the old one.

Tensors are master weights and moments; everything else a resumed run needs follows from a few numbers
(order of data, anchors and learning rate are functions of the step).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import Tensor

from paceline.core.errors import ModelError
from paceline.models import checkpoint
from paceline.models.checkpoint import Checkpoint, TensorSpec

log = logging.getLogger(__name__)

_KEY = "paceline-train-1"


@dataclass(slots=True)
class Journey:
    """How far a run has come."""

    step: int = 0  # optimiser steps taken
    steps: int | None = None  # in all; None: not decided yet
    minutes: float | None = None  # that `steps` was decided for
    seconds: float = 0.0  # spent training, in all calls
    num_anchors: int = 0  # blocks trained on
    data: dict[str, object] = field(default_factory=dict)  # whose data it was: must not change
    best_accept: float = 0.0
    best_step: int = -1


def save(path: Path, tensors: Mapping[str, Tensor], journey: Journey) -> bool:
    """Write the state; on failure the file of the last time is untouched.

    Returns:
        Whether it was written; a full or read-only disk is reported in the log.
    """
    specs = [
        TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    try:
        checkpoint.write(path, specs, tensors.values(), {_KEY: json.dumps(asdict(journey))})
    except OSError as error:
        kept = f"the one of before is kept in {path}" if path.exists() else "there is none yet"
        log.error(  # noqa: TRY400 (the reason says it all)
            "the state of step %d could not be saved (%s); %s. Make room on the disk.",
            journey.step,
            error,
            kept,
        )
        return False
    return True


def load(path: Path) -> tuple[dict[str, Tensor], Journey] | None:
    """Read the state; None if there is none.

    Raises:
        ModelError: the file is damaged or not one of ours.
    """
    if not path.is_file():
        return None
    source = _opened(path)
    return {name: source.read(name) for name in source.shapes}, _journey(source)


def load_journey(path: Path) -> Journey:
    """How far the run of a saved state has come.

    Raises:
        ModelError: there is no state, or it is damaged.
    """
    return _journey(_opened(path))


def _opened(path: Path) -> Checkpoint:
    return Checkpoint(
        path, remedy="Delete it to start training from the beginning, on the same answers."
    )


def _journey(source: Checkpoint) -> Journey:
    try:
        return Journey(**json.loads(source.metadata[_KEY]))
    except (KeyError, ValueError, TypeError) as error:
        msg = (
            f"{source.where} is no training state of this version ({error!r}); delete it to start "
            "training from the beginning, or use the version that wrote it"
        )
        raise ModelError(msg) from error
