"""Kinds of drafters that can be trained, and what each of them adds to the stages that all share.

A line in both registries and a `Method` are all that a new one needs. The first registry is what a
command line reads to make its flags, so what it names imports no network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from paceline.core.registry import Registry
from paceline.train.settings import TrainSettings

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.core.config import DraftConfig
    from paceline.train.run import Run
    from paceline.train.trainer import Saver, Task

S = TypeVar("S", bound=TrainSettings)

SETTINGS: Registry[type[TrainSettings]] = Registry(
    "drafter to train",
    {
        "dflash": "paceline.train.dflash_settings:DFlashSettings",
        "eagle3": "paceline.train.eagle3_settings:Eagle3Settings",
    },
)
METHODS: Registry[Method[Any]] = Registry(
    "drafter to train",
    {
        "dflash": "paceline.train.train_dflash:METHOD",
        "eagle3": "paceline.train.train_eagle3:METHOD",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A drafter in training and what the trainer must know of it."""

    task: Task
    num_targets: int  # R: tokens after an anchor that are predicted
    save: Saver
    data: Mapping[str, object]  # what else a resumed run must have the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What the card says about a drafter of this kind. Markdown."""

    title: str
    about: str  # what it is and what shape it has
    recipe: str  # what was trained, on what and by which loss; half a sentence
    num_parameters: int
    facts: Mapping[str, object]  # for the record


class Method(Protocol[S]):
    """One kind of drafter."""

    @property
    def settings(self) -> type[S]:
        """What can be told to its training."""
        ...

    def check(self, run: Run[S]) -> None:
        """Refuse what can't fit the target, before anything is computed or loaded.

        Raises:
            ConfigError: the settings do not fit the target's shape.
            ModelError: the drafter given is missing or of another layout.
        """
        ...

    def learner(self, run: Run[S]) -> Learner:
        """The drafter with first weights, or those of `--init`.

        Raises:
            ConfigError: the settings do not fit the target, the answers or the drafter given.
            ModelError: the drafter given is damaged or of another layout.
        """
        ...

    def served(self, run: Run[S], folder: Path) -> DraftConfig:
        """How the engine runs a drafter's folder when it is measured."""
        ...

    def export(self, run: Run[S], source: Path, folder: Path) -> Words:
        """Load `source` as anybody would, and write it to `folder` for others to load."""
        ...
