"""What can be told to the training of an EAGLE-3 drafter alone. Letter: K steps of a chain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from paceline.train.settings import TrainSettings, doc

Form: TypeAlias = Literal["eagle3", "eagle3.1"]
_NUM_TAPS = 3  # low, mid, high


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Settings(TrainSettings):
    """A run that trains an EAGLE-3 drafter."""

    method: ClassVar[str] = "eagle3"
    LOWEST: ClassVar[Mapping[str, int]] = {
        **TrainSettings.LOWEST,
        "anchors": 0,
        "ttt_steps": 1,
        "draft_vocab": 2,
    }

    taps: tuple[int, ...] = field(
        default=(),
        metadata=doc("tapped target layers: low, mid, high; default: 1, L/2 - 1, L - 4", "Drafter"),
    )
    form: Form = field(
        default="eagle3.1",
        metadata=doc(
            "eagle3.1: each tap is normed, and what is fed back; eagle3: for engines that know no more",
            "Drafter",
        ),
    )
    draft_vocab: int = field(
        default=8192,
        metadata=doc("tokens that can be drafted: the most frequent of the answers", "Drafter"),
    )
    remap: bool = field(
        default=False,
        metadata=doc(
            "with --init: draft the most frequent tokens of these answers, whatever the folder says",
            "Drafter",
        ),
    )
    ttt_steps: int = field(
        default=7, metadata=doc("K: steps of a chain, each fed by the one before", "Training")
    )
    anchors: int = field(
        default=0,
        metadata=doc(
            "N: chains trained per row; 0: from nearly every token of an answer", "Training"
        ),
    )
    lr: float = field(default=1.0e-3, metadata=doc("highest learning rate", "Training"))
    gamma: float = field(
        default=4.48,  # exp(-1 / 4.48) = 0.8
        metadata=doc(
            "step k weighs exp(-(k-1)/gamma), by default 0.8^(k-1); 0: all alike", "Training"
        ),
    )

    def own_problems(self) -> list[str]:
        """See `TrainSettings`."""
        problems = []
        if self.taps and len(self.taps) != _NUM_TAPS:
            problems.append(
                f"--taps {' '.join(map(str, self.taps))} must be three layers: low, mid, high"
            )
        if self.remap and self.init is None:
            problems.append("--remap is about a drafter given with --init")
        return problems
