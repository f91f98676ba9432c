"""Alarm: says once that a drafter network drafts in vain, which nothing else shows but slow decoding.

Counted is what the host knows anyway: in how many row-steps the network was asked, and in how many of
them one of its first drafts was the token that the target emitted. Whether they were verified makes no
difference, so a policy that verifies none hides nothing. A policy that does not even ask would: where
the network was never right so far, it is asked now and then aside from the policy, for a hundredth of
the time at most, until there is evidence enough.

The bar is low on purpose. After random tokens, at temperature 1, the drafters that come along were right in
20 % of the steps and more; weights without meaning never are. Rows above
temperature 1, or with tokens forbidden or favoured, do not count: no drafter knows those choices. Neither do
steps in which another part of a merged drafter was right: its node may stand for the network's as well.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.core.config import DraftConfig
    from paceline.core.request import SamplingParams
    from paceline.core.tree import Proposal
    from paceline.draft.base import DrafterSpec

log = logging.getLogger(__name__)

_LEAST_STEPS = 256  # row-steps that a drafter could have helped in
# Of the steps counted, those with a network's drafts. Where one in five is right, none of 32 is by a
# chance of 1 : 1,262.
_LEAST_ASKED = 32
_RARE = 32  # right less often than once in so many
_ASIDE_SHARE = 0.01  # of the time, for asking aside from the policy


class Alarm:
    """One per engine.

    Args:
        spec: of the drafter; a host drafter, which belongs to no target, raises no alarm.
        config: names it in the message.
    """

    def __init__(self, spec: DrafterSpec, config: DraftConfig) -> None:
        self._source = spec.source
        self._name, self._folder = config.method, config.model
        self.active = spec.source > 0  # nothing was said yet, and there is something to say
        self.num_steps = 0
        self.num_asked = 0
        self.num_right = 0
        self._seconds = self._aside_seconds = 0.0

    def wants_evidence(self) -> bool:
        """Whether to ask the drafter in a step in which the policy would not."""
        return (
            self.active
            and not self.num_right
            and self.num_asked < _LEAST_ASKED
            and self._aside_seconds <= _ASIDE_SHARE * self._seconds
        )

    def took(self, seconds: float, aside_seconds: float) -> None:
        """A step's whole time, and how much of it went into drafts aside from the policy."""
        self._seconds += seconds
        self._aside_seconds += aside_seconds

    def first_right(self, proposal: Proposal, token: int) -> int | None:
        """The source of the first draft that is `token`; 0: none is; None: the network said nothing."""
        sources = proposal.sources or (self._source,) * len(proposal.tokens)
        first = [i for i, parent in enumerate(proposal.parents) if parent < 0]
        for i in first:
            if proposal.tokens[i] == token:
                return sources[i]
        return 0 if any(sources[i] == self._source for i in first) else None

    def saw(self, params: SamplingParams, right: int | None) -> None:
        """One step of a row that may have drafts.

        Args:
            params: of the row's request.
            right: as from `first_right`; None where the drafter was not asked.
        """
        if not self.active or not _telling(params):
            return
        self.num_steps += 1
        if right in {0, self._source}:
            self.num_asked += 1
            self.num_right += right == self._source
        rare = self.num_right * _RARE < self.num_asked
        if rare and self.num_steps >= _LEAST_STEPS and self.num_asked >= _LEAST_ASKED:
            self.active = False
            log.warning(
                "the drafter network of %s in %s drafts in vain: asked in %d of %d steps, it had the next "
                "token right in %d. Answers are right all the same, but decoding gains nothing. "
                "'paceline check drafter --spec %s --spec-model %s' tells whether it belongs to this "
                "model and is read rightly; --spec suffix needs no network",
                self._name,
                self._folder,
                self.num_asked,
                self.num_steps,
                self.num_right,
                self._name,
                self._folder,
            )


def _telling(params: SamplingParams) -> bool:
    """Whether a drafter that knows its target must be expected to know this row's choices too."""
    free = params.allowed_token_ids is None and not params.banned_token_ids
    return free and not params.logit_bias and params.temperature <= 1.0
