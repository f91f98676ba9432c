"""Does this drafter belong to this target? A test on a few hundred tokens of the target's own.

A drafter that does not belong, or that is read with a wrong convention, runs without an error: outputs
stay right and only acceptance falls. So the target answers a few prompts greedily, and every place of the
answers is drafted from at once, all before it being right (`teacher_forcing.py`). That is repeated with
every other reading that a configuration could mean: taps one layer earlier or later, the other layout,
the other mask, the other norm flags. If one of these is clearly better, the configuration is wrong and
the report says what to change; if none is and next to nothing agrees, the drafter was made for another
target.

Clearly better: by 3 % and by four standard errors of the paired differences; places of one text
are not independent, hence four.

Not here: what a kind of drafter's readings are (`selftest_dflash.py`, `selftest_eagle3.py`), what files
alone say (`selftest_static.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from paceline.core.registry import Registry
from paceline.draft.teacher_forcing import streams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.core.config import DraftConfig
    from paceline.draft.base import DraftNet, TargetInfo
    from paceline.draft.eagle3_votes import Findings
    from paceline.draft.selftest_static import Finding

SUBJECTS: Registry[Callable[[DraftConfig, TargetInfo], Subject]] = Registry(
    "drafter to check",
    {
        "dflash": "paceline.draft.selftest_dflash:DFlashSubject",
        "ddtree": "paceline.draft.selftest_dflash:DFlashSubject",
        "eagle3": "paceline.draft.selftest_eagle3:Eagle3Subject",
    },
)

LEAST_FIRST = 0.15  # of first drafts that are right, of any drafter that knows its target
_ERRORS = 4.0
_SHARE, _LEAST = 0.03, 0.05  # by how much a reading must be better: a share, and matched drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt and what the target answered greedily."""

    tokens: Sequence[int]
    num_prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One way to read a drafter's files."""

    name: str
    change: str  # what to change in config.json; "" for the reading as configured
    taps: tuple[int, ...]  # outputs of target layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How a reading drafts: from n places, up to K tokens."""

    reading: Reading
    right: Tensor  # [n, K] bool: draft k is what the target says, if all before was right
    judged: Tensor  # [n, K] bool: the text goes that far

    @property
    def num_places(self) -> int:
        """n."""
        return self.right.shape[0]

    @property
    def by_position(self) -> list[float]:
        """Share of right drafts at each of the K positions; 0 where none was judged."""
        judged = self.judged.sum(0).clamp(min=1)
        return ((self.right & self.judged).sum(0) / judged).tolist()

    @property
    def matched(self) -> Tensor:
        """[n] int64 leading drafts of each place that are right."""
        return (self.right & self.judged).to(torch.int64).cumprod(1).sum(1)

    @property
    def accept_length(self) -> float:
        """Mean tokens per verify over all places, bonus included."""
        return 1.0 + float(self.matched.double().mean())


class Subject(Protocol):
    """A drafter under test, with its weights."""

    findings: Sequence[Finding]  # what its files alone say

    def readings(self) -> Sequence[Reading]:
        """As configured first; then what else the files could mean."""
        ...

    def draft(
        self, reading: Reading, text: Text, features: Mapping[int, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Draft from every place of a text's answer.

        Args:
            reading: how.
            text: its T tokens.
            features: by target layer, the residual streams [T, Ht].

        Returns:
            [n, K] int64 drafts, and [n, K] int64 the text's tokens there, -1 past its end.
        """
        ...

    def vocabulary(self, texts: Sequence[tuple[Text, Mapping[int, Tensor]]]) -> Findings | None:
        """What a draft vocabulary's map is worth; None where there is no such map."""
        ...


Outcome = Literal["fits", "misread", "wrong map", "another target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a test found."""

    outcome: Outcome
    advice: str  # what it means and what to do, in a sentence or two
    trials: Sequence[Trial]  # as configured first
    vocabulary: Findings | None
    findings: Sequence[Finding]


@torch.inference_mode()
def examine(
    subject: Subject, target: DraftNet, texts: Sequence[Text], device: torch.device
) -> Report:
    """Test a drafter on the target's own answers.

    Args:
        subject: the drafter.
        target: called with taps.
        texts: at least one, with answers of two tokens or more.
        device: the target's.
    """
    readings = subject.readings()
    layers = [layer for reading in readings for layer in reading.taps]
    both = [(t, streams(target, torch.tensor(t.tokens, device=device), layers)) for t in texts]
    trials = []
    for reading in readings:
        parts = [subject.draft(reading, text, features) for text, features in both]
        drafts, truth = (torch.cat(part) for part in zip(*parts, strict=True))
        trials.append(Trial(reading=reading, right=drafts == truth, judged=truth >= 0))
    vocabulary = subject.vocabulary(both)
    outcome, advice = judge(trials, vocabulary)
    return Report(
        outcome=outcome,
        advice=advice,
        trials=trials,
        vocabulary=vocabulary,
        findings=subject.findings,
    )


def judge(trials: Sequence[Trial], vocabulary: Findings | None) -> tuple[Outcome, str]:
    """What the figures mean.

    Args:
        trials: as configured first.
        vocabulary: what the map is worth, if there is one.
    """
    own = trials[0]
    first = own.by_position[0]
    better = [trial for trial in trials[1:] if clearly_better(trial, own)]
    best = max(better, key=lambda trial: trial.accept_length, default=own)
    figures = (
        f"{first:.1%} of first drafts are what the target says, accept length "
        f"{own.accept_length:.2f} ({own.num_places} places)"
    )
    if best is not own and best.by_position[0] >= LEAST_FIRST:
        return "misread", (
            f"{figures}; read with {best.reading.name} it is {best.by_position[0]:.1%} and "
            f"{best.accept_length:.2f}. {best.reading.change}"
        )
    # A head that knows the target says so through the map that is read off it.
    heard = vocabulary is not None and vocabulary.right_as_read >= LEAST_FIRST
    if vocabulary is not None and vocabulary.wrong and heard:
        return "wrong map", (
            f"{figures}; the vocabulary map does not belong to the head: {vocabulary.describe()}. "
            "Take d2t and t2d from the folder that the head came from, or train on with --remap."
        )
    if first < LEAST_FIRST:
        more = f" Its vocabulary map: {vocabulary.describe()}." if vocabulary is not None else ""
        return "another target", (
            f"{figures}, and no other reading is clearly better: it was trained for another target, "
            f"or hardly at all.{more} Use a drafter that was trained for this model."
        )
    return "fits", f"{figures}; no other reading is clearly better"


def clearly_better(one: Trial, other: Trial) -> bool:
    """Whether `one` matches more of the text than `other`, place by place, beyond chance.

    Only drafts that both have count.
    """
    width = min(one.right.shape[1], other.right.shape[1])
    mine, its = (
        (t.right & t.judged)[:, :width].to(torch.int64).cumprod(1).sum(1).double()
        for t in (one, other)
    )
    gains = mine - its
    error = float(gains.std(correction=0)) / math.sqrt(len(gains))
    needed = max(_LEAST, _SHARE * float(its.mean()), _ERRORS * error)
    return float(gains.mean()) >= needed


def shifted(taps: tuple[int, ...], num_layers: int, where: str) -> list[Reading]:
    """Readings with all taps one layer later and earlier, where the target has those.

    Args:
        taps: as configured, outputs.
        num_layers: of the target.
        where: the key of config.json that names them.
    """
    found = []
    for shift, why in ((1, "are one too low"), (-1, "seem to count inputs")):
        moved = tuple(tap + shift for tap in taps)
        if all(0 <= tap < num_layers for tap in moved):
            change = f"Name the outputs of layers {list(moved)}: the numbers in {where} {why}."
            found.append(Reading(name=f"taps {shift:+d}", change=change, taps=moved))
    return found
