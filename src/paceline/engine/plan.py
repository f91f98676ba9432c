"""StepPlan: what the next step computes, as the scheduler decided; lengths and rows, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.batch import ForwardMode
from paceline.engine.sequence import Sequence

if TYPE_CHECKING:
    from paceline.engine.guides import Guide


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of known tokens to be cached in an EXTEND step."""

    sequence: Sequence
    start: int
    count: int
    final: bool  # the last one: the row decodes afterwards
    picks: bool  # the last one of a new prompt: its next token is picked
    scores: bool = False  # the request asks for the log-probabilities of the prompt's tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the next step computes."""

    mode: ForwardMode
    chunks: tuple[Chunk, ...] = ()  # EXTEND
    sequences: tuple[Sequence, ...] = ()  # BLOCK
    budgets: tuple[int, ...] = ()  # BLOCK: most draft nodes per row, root excluded

    @property
    def guides(self) -> tuple[Guide | None, ...]:
        """BLOCK: the rows' grammars."""
        return tuple(s.guide for s in self.sequences)
