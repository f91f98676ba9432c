"""What can be told to the training of a DFlash drafter alone. Letter: b block size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from paceline.train.settings import TrainSettings, doc


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashSettings(TrainSettings):
    """A run that trains a DFlash drafter."""

    method: ClassVar[str] = "dflash"
    LOWEST: ClassVar[Mapping[str, int]] = {**TrainSettings.LOWEST, "layers": 1, "block": 2}

    taps: tuple[int, ...] = field(
        default=(), metadata=doc("tapped target layers; default: five, spread evenly", "Drafter")
    )
    layers: int = field(default=4, metadata=doc("draft layers", "Drafter"))
    block: int = field(default=8, metadata=doc("rows of a block, the known token's too", "Drafter"))
    mask_token: int | None = field(
        default=None,
        metadata=doc("id of the mask; default: a special token text has not", "Drafter"),
    )
