"""Sequence: the host's mutable record of one request, owned by the scheduler.

Lengths, for a sequence that decodes (one word each, see the glossary):

    tokens:   [ prompt ............ | emitted ........ , next ]
    cached:   [ prompt ............ | emitted ........ ]          num_cached == len(tokens) - 1

`next`, the newest emitted token, has been picked but its KV entry is not written: it is the root of
the next tree. A step in flight (results not yet read) may add tokens that the host does not know.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.request import FinishReason, Request, RequestStats, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from paceline.engine.guides import Guide


class Phase(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # no row, no pages
    PREFILL = "prefill"  # has a row; some of its known tokens are not cached yet
    DECODE = "decode"  # all but the newest token are cached
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on its way through the engine."""

    request: Request
    seed: int
    limit: int  # most known tokens, prompt included
    arrival: int  # order of arrival; the youngest is preempted first
    tokens: list[int] = field(default_factory=list)
    guide: Guide | None = None  # the request's grammar; stands after all emitted tokens
    phase: Phase = Phase.WAITING
    row: int = -1
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0  # tokens whose KV is written, as far as the host knows
    num_published: int = 0  # leading pages that the prefix cache knows
    in_flight: int = 0  # launched steps whose results were not read
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    # counters
    num_hit: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_forced: int = 0
    num_drafts: int = 0
    num_drafter_steps: int = 0
    num_preemptions: int = 0
    histogram: list[int] = field(default_factory=lambda: [0])
    steps: list[tuple[int, int]] = field(default_factory=list)  # drafted, accepted; where asked for
    # Position -> what the model expected there, where asked for; until the first token is out.
    prompt_scores: dict[int, TokenLogprobs] = field(default_factory=dict)
    added_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt_ids)

    @property
    def scores_prompt(self) -> bool:
        """Whether what is prefilled must be scored."""
        return self.request.prompt_logprobs is not None and not self.num_emitted

    @property
    def num_emitted(self) -> int:
        """Emitted tokens, the newest included."""
        return len(self.tokens) - self.num_prompt

    @property
    def prefill_target(self) -> int:
        """Tokens to be cached before decoding: all of a new prompt, all but `next` of a resumed one."""
        return len(self.tokens) - (1 if self.num_emitted else 0)

    @property
    def room(self) -> int:
        """Tokens that may still be emitted, as far as the host knows."""
        return self.limit - len(self.tokens)

    def record_step(self, drafted: int, by_drafter: int, accepted: int, forced: int) -> None:
        """Count one verify pass of this sequence.

        Args:
            drafted: nodes that were verified, the root excluded.
            by_drafter: those of them that the drafter proposed; the others are the grammar's.
            accepted: of the drafted ones.
            forced: of the accepted ones, the grammar's.
        """
        self.num_steps += 1
        self.num_drafts += drafted > 0
        self.num_drafter_steps += by_drafter > 0
        self.num_drafted += drafted
        self.num_accepted += accepted
        self.num_forced += forced
        if accepted >= len(self.histogram):
            self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1
        if self.request.lists_steps:
            self.steps.append((drafted, accepted))

    def take_prompt_scores(self) -> list[TokenLogprobs | None] | None:
        """What is told of the prompt's tokens with the first emitted one; None: nobody asks."""
        if not self.scores_prompt:
            return None
        taken, self.prompt_scores = self.prompt_scores, {}
        return [None, *(taken[position] for position in range(1, self.num_prompt))]

    def stats(self) -> RequestStats:
        """Counters so far; times in seconds."""
        params = self.request.params
        end = self.finished_at if self.finished_at is not None else time.perf_counter()
        started = self.started_at if self.started_at is not None else end
        first = self.first_token_at if self.first_token_at is not None else end
        return RequestStats(
            seed=self.seed,
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=self.num_hit,
            num_output_tokens=self.num_emitted,
            num_steps=self.num_steps,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            accept_histogram=tuple(self.histogram),
            num_preemptions=self.num_preemptions,
            num_forced=self.num_forced,
            num_drafts=self.num_drafts,
            num_drafter_steps=self.num_drafter_steps,
            drafted_per_step=tuple(drafted for drafted, _ in self.steps),
            accepted_per_step=tuple(accepted for _, accepted in self.steps),
            drafter="none" if params.num_speculative_tokens == 0 else params.drafter,
            queue_s=started - self.added_at,
            prefill_s=first - started,
            decode_s=end - first,
        )

    def first_stop(self, emitted: Seq[int]) -> int | None:
        """How many of `emitted` (the newest tokens) are kept by the first stop id; None: all go on.

        `min_tokens` bans stop ids before they are picked, so none can stand there too early.
        """
        for i, token in enumerate(emitted):
            if token in self.request.stop_ids:
                return i + 1
        return None
