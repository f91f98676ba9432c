"""Job: what an HTTP request asks of the engine, in ids and sampling options; no text, no wire format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.request import Constraint, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Prompts to be continued together, `params.n` samples each.

    `scope` separates tenants: prefix cache and suffix tree share nothing across scopes. `shows_trees`:
    chunks carry the trees that were verified, where the host knows them. `prompt_logprobs`: see
    `core.request.Request`.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    constraint: Constraint | None = None
    scope: str = ""
    shows_trees: bool = False
    prompt_logprobs: int | None = None

    @property
    def num_answers(self) -> int:
        """How many results the job ends with."""
        return len(self.prompts) * self.params.n
