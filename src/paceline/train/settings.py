"""TrainSettings: every choice of a training run. Command-line flags are made from its fields.

What one kind of drafter alone can be told is in a subclass (`dflash_settings.py`, `eagle3_settings.py`).
`help` in a field's metadata is the flag's text. Letters: S rows of a step, C tokens of a row, N anchors
of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, TypeAlias

from paceline.core.config import DType
from paceline.core.errors import ConfigError

Loss: TypeAlias = Literal["decay", "dpace"]
Stage: TypeAlias = Literal["prepare", "generate", "train", "finish"]
STAGES: tuple[Stage, ...] = ("prepare", "generate", "train", "finish")


def doc(text: str, group: str) -> Mapping[str, Any]:
    """A field's metadata: its flag's text, and under which heading that stands."""
    return {"help": text, "group": group}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """A run. What may differ between two calls of one run is said in `FREE`."""

    method: ClassVar[str]
    LOWEST: ClassVar[Mapping[str, int]] = {
        "max_new_tokens": 2,
        "max_prompt_tokens": 1,
        "max_rows": 1,
        "answer_tokens": 1,
        "row_tokens": 16,
        "batch_rows": 1,
        "anchors": 1,
        "warmup": 0,
        "evals": 0,
        "eval_docs": 1,
        "engine_prompts": 0,
        "log_steps": 1,
    }

    # -- run
    model: str = field(
        default="default", metadata=doc("the target: folder, GGUF file or 'default'", "Run")
    )
    device: str = field(default="auto", metadata=doc("auto, cpu, cuda, cuda:N", "Run"))
    dtype: DType = field(
        default="auto", metadata=doc("of target and drafter; master weights are float32", "Run")
    )
    seed: int = field(default=0, metadata=doc("of data order, anchors and first weights", "Run"))
    minutes: float | None = field(
        default=None, metadata=doc("stop and save after so many minutes; go on later", "Run")
    )
    stages: tuple[str, ...] = field(
        default=STAGES, metadata=doc("which of prepare, generate, train, finish", "Run")
    )
    answers: tuple[Path, ...] = field(
        default=(),
        metadata=doc("folders of other runs whose prompts and answers are used as they are", "Run"),
    )
    # -- data
    prompts: tuple[Path, ...] = field(
        default=(),
        metadata=doc(
            "JSONL files, gzipped or not, of messages, turns, question or prompt; see docs/training.md",
            "Data",
        ),
    )
    broken: Literal["refuse", "skip"] = field(
        default="refuse", metadata=doc("what to do about lines that are no prompts", "Data")
    )
    own_share: float = field(
        default=0.5, metadata=doc("share of prompts that the target makes itself", "Data")
    )
    own_temperature: float = field(
        default=1.0, metadata=doc("at which the target makes prompts", "Data")
    )
    openings: tuple[str, ...] = field(
        default=("",),
        metadata=doc("what prompts of the target's own begin with, by turns; '': anything", "Data"),
    )
    temperatures: tuple[float, ...] = field(
        default=(0.0, 0.0, 0.7, 1.0),
        metadata=doc("of answers, in equal parts; repeat one to have more of it", "Data"),
    )
    answer_tokens: int = field(
        default=2_000_000, metadata=doc("answer tokens to generate in all", "Data")
    )
    generate_minutes: float | None = field(
        default=None, metadata=doc("most minutes of this call for generating", "Data")
    )
    max_prompt_tokens: int = field(default=256, metadata=doc("longer prompts are left out", "Data"))
    max_new_tokens: int = field(default=256, metadata=doc("longest answer", "Data"))
    max_rows: int = field(default=512, metadata=doc("answers generated at once", "Data"))
    held_out: float = field(
        default=0.01, metadata=doc("share of prompts kept for measuring", "Data")
    )
    # -- drafter
    init: Path | None = field(
        default=None, metadata=doc("go on from this drafter's weights and shape", "Drafter")
    )
    taps: tuple[int, ...] = field(
        default=(), metadata=doc("tapped target layers; default: spread evenly", "Drafter")
    )
    mlp_size: int | None = field(
        default=None, metadata=doc("width of the draft MLPs; default: the target's", "Drafter")
    )
    # -- optimisation
    steps: int | None = field(default=None, metadata=doc("optimiser steps in all", "Training"))
    train_minutes: float | None = field(
        default=None,
        metadata=doc("instead of steps: minutes of training in all calls together", "Training"),
    )
    row_tokens: int = field(default=512, metadata=doc("C: tokens of a packed row", "Training"))
    batch_rows: int = field(default=64, metadata=doc("S: rows of a step", "Training"))
    anchors: int = field(default=128, metadata=doc("N: blocks trained per row", "Training"))
    lr: float = field(default=1.2e-3, metadata=doc("highest learning rate", "Training"))
    warmup: int = field(default=200, metadata=doc("steps of linear warm-up", "Training"))
    weight_decay: float = field(default=0.0, metadata=doc("of matrices", "Training"))
    clip: float = field(default=1.0, metadata=doc("largest norm of the gradient", "Training"))
    loss: Loss = field(
        default="decay",
        metadata=doc(
            "weights of a block's rows: decay, or dpace, which also counts how likely the rows' right "
            "tokens are by now; see docs/training.md",
            "Training",
        ),
    )
    gamma: float = field(
        default=4.0, metadata=doc("row k weighs exp(-(k-1)/gamma); 0: all alike", "Training")
    )
    alpha: float = field(default=0.5, metadata=doc("smoothing of dpace", "Training"))
    compile: bool | None = field(
        default=None, metadata=doc("torch.compile; default: on CUDA", "Training")
    )
    # -- measuring
    evals: int = field(default=8, metadata=doc("measurements along the way", "Measuring"))
    eval_docs: int = field(
        default=256, metadata=doc("held-out answers of a measurement", "Measuring")
    )
    engine_prompts: int = field(
        default=128,
        metadata=doc("held-out prompts measured in the engine at the end", "Measuring"),
    )
    save_minutes: float = field(
        default=2.0, metadata=doc("minutes between saved states", "Measuring")
    )
    log_steps: int = field(default=50, metadata=doc("steps between two lines", "Measuring"))

    @property
    def row_room(self) -> int:
        """Tokens that the longest sequence takes."""
        return self.max_prompt_tokens + self.max_new_tokens

    def check(self) -> None:
        """Refuse what no run can have; all problems in one message.

        Raises:
            ConfigError: as above.
        """
        problems = [
            f"{flag(name)} {getattr(self, name)} must be >= {low}"
            for name, low in self.LOWEST.items()
            if getattr(self, name) < low
        ]
        shares = {
            "own_share": (0 <= self.own_share <= 1, "in 0 ... 1"),
            "own_temperature": (0 < self.own_temperature <= 10, "above 0, at most 10"),
            "held_out": (0 < self.held_out < 1, "between 0 and 1"),
            "mlp_size": (self.mlp_size is None or self.mlp_size >= 1, ">= 1"),
            "lr": (0 < self.lr <= 1, "above 0, at most 1"),
            "weight_decay": (_finite(self.weight_decay), "a number >= 0"),
            "clip": (self.clip > 0, "> 0"),
            "gamma": (self.gamma >= 0, ">= 0"),
            "alpha": (0 <= self.alpha <= 1, "in 0 ... 1"),
            "steps": (self.steps is None or self.steps > 0, "> 0"),
            "minutes": (self.minutes != 0 and _finite(self.minutes), "a number > 0"),
            "train_minutes": (
                self.train_minutes != 0 and _finite(self.train_minutes),
                "a number > 0",
            ),
            "generate_minutes": (_finite(self.generate_minutes), "a number >= 0"),
            "save_minutes": (_finite(self.save_minutes), "a number >= 0"),
        }
        problems += [
            f"{flag(name)} {getattr(self, name)} must be {what}"
            for name, (good, what) in shares.items()
            if not good
        ]
        if not self.openings:
            problems.append("--openings must be one or more; '' leaves the beginning to the target")
        if not self.temperatures or any(not 0 <= t <= 10 for t in self.temperatures):
            given = " ".join(map(str, self.temperatures)) or "(none)"
            problems.append(f"--temperatures {given} must be one or more of 0 ... 10")
        unknown = [s for s in self.stages if s not in STAGES]
        if unknown:
            problems.append(f"--stages {' '.join(unknown)} are none of {', '.join(STAGES)}")
        if "train" in self.stages and (self.steps is None) == (self.train_minutes is None):
            problems.append("give either --steps or --train-minutes")
        makes = not self.answers and "prepare" in self.stages
        if self.own_share < 1 and not self.prompts and makes:
            problems.append(
                "give --prompts, or --own-share 1 to train on the target's own alone, or --answers "
                "with the folder of a run that has them"
            )
        problems += self.own_problems()
        if problems:
            msg = "invalid settings: " + "; ".join(problems)
            raise ConfigError(msg)

    def own_problems(self) -> list[str]:
        """What else is wrong, by what one kind of drafter alone knows."""
        return []


# What may change from call to call, and is kept when it does; all else is fixed by the first call.
FREE: Final = frozenset(
    {
        "model",
        "answers",
        "prompts",
        "broken",
        "answer_tokens",
        "max_rows",
        "train_minutes",
        "steps",
        "evals",
        "eval_docs",
        "engine_prompts",
        "save_minutes",
        "log_steps",
    }
)
# What is said anew by every call.
PER_CALL: Final = frozenset({"device", "minutes", "generate_minutes", "stages", "compile"})
# What belongs to answers, and so comes along with another run's; `max_rows` is the machine's.
OF_ANSWERS: Final = frozenset(
    f.name for f in fields(TrainSettings) if f.metadata["group"] == "Data"
) - {"max_rows", "generate_minutes"}


def flag(name: str) -> str:
    """A setting's name as the command line has it."""
    return "--" + name.replace("_", "-")


def _finite(value: float | None) -> bool:
    """Whether a number that must not be negative, if there is one, is one and has an end."""
    return value is None or 0 <= value < math.inf


def as_json(settings: TrainSettings) -> dict[str, object]:
    """Settings as JSON's types."""
    return {f.name: _plain(getattr(settings, f.name)) for f in fields(settings)}


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
