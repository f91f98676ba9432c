"""What chunks of chat and of completions have in common: their head, the usage, figures with the last.

Not here: choices, which each path makes (chat.py, completions.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.api.server.accounting import figures_of, tokens_used

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.api.results import Chunk, Result
    from paceline.api.server.context import Context
    from paceline.api.server.head import Head
    from paceline.api.server.job import Job
    from paceline.api.server.protocol_sampling import SamplingFields


class Envelope:
    """Puts choices of one job into the wire's chunks, and counts what went by.

    Args:
        kind: the chunks' `object`.
        head: facts that they repeat.
        body: what is asked of usage.
        job: whose chunks they are.
        context: what is served.
    """

    def __init__(
        self, kind: str, *, head: Head, body: SamplingFields, job: Job, context: Context
    ) -> None:
        self._job, self._context = job, context
        self._head = head.fields(kind)
        self._counts, self._counts_at_end = body.wants_running_usage, body.wants_usage
        # What all chunks have in common, made once: there is one for every token.
        self._common = {**self._head, "usage": None} if self._counts_at_end else self._head
        self._generated = 0
        self.results: list[Result] = []  # of the answers that have ended

    def saw(self, chunk: Chunk) -> None:
        """Count a chunk of the engine."""
        self._generated += len(chunk.token_ids)
        if chunk.result is not None:
            self.results.append(chunk.result)

    def chunk(self, choice: dict[str, Any], *, last: bool) -> dict[str, Any]:
        """A chunk with one choice; `last`: of its answer."""
        found = {**self._common, "choices": [choice]}
        if self._counts:
            prompt = sum(len(ids) for ids in self._job.prompts)
            found["usage"] = tokens_used(prompt, self._generated)
        if last and not self._counts_at_end and len(self.results) == self._job.num_answers:
            found |= figures_of(self.results, self._context)
        return found

    def end(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The chunk after all answers."""
        closing = {"choices": [], "usage": usage}
        return self._head | closing | figures_of(self.results, self._context)
