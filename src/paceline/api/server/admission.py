"""Admission: how much may wait before the next request is told to come back later.

It counts answers (a request's prompts times its n) and the prompt tokens of those that have shown no
token yet. No state of the engine is asked, so a refusal costs nothing. Event loop only.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.api.server.errors import DrainingError, QueueFullError
from paceline.api.server.job import Job
from paceline.core.errors import RequestError

_LONGEST_WAIT = 60.0  # seconds that a refused client is told at most
_MEMORY = 0.9  # of the mean time per answer: how much of it an answer leaves


@dataclass(slots=True, eq=False)
class Ticket:
    """What one admitted job takes of the room."""

    num_open: int
    tokens: dict[
        tuple[int, int], int
    ]  # (prompt, sample) -> prompt tokens; without those that began


class Admission:
    """The room for answers, and who is in it.

    Args:
        max_rows: answers that the engine makes at the same time.
        max_queued_requests: answers that may wait beside those.
        max_queued_tokens: prompt tokens that may wait, of all that wait; None: any number.
    """

    def __init__(
        self, *, max_rows: int, max_queued_requests: int, max_queued_tokens: int | None
    ) -> None:
        self._max_rows = max_rows
        self._max_queued = max_queued_requests
        self._max_tokens = max_queued_tokens
        self._mean_s = 1.0  # per answer
        self.num_open = 0
        self.queued_tokens = 0
        self.draining = False

    @property
    def num_waiting(self) -> int:
        """Answers for which the engine has no row."""
        return max(0, self.num_open - self._max_rows)

    def enter(self, job: Job) -> Ticket:
        """Let a job in.

        Raises:
            DrainingError: the server ends.
            QueueFullError: too much waits already.
            RequestError: the job alone is more than may ever wait.
        """
        if self.draining:
            msg = "the server is shutting down and takes no more requests; ask another replica"
            raise DrainingError(msg, retry_after_s=self.retry_after_s)
        most = self._max_rows + self._max_queued
        if job.num_answers > most:
            msg = (
                f"{job.num_answers} answers were asked for in one request; this server makes and "
                f"queues {most} at most; send several requests, or ask for fewer"
            )
            raise RequestError(msg)
        if self.num_open + job.num_answers > most:
            msg = (
                f"{self.num_waiting} answers wait already, and {self._max_queued} may; come back "
                "later, as Retry-After says"
            )
            raise QueueFullError(msg, retry_after_s=self.retry_after_s)
        tokens = {
            (prompt, sample): len(ids)
            for prompt, ids in enumerate(job.prompts)
            for sample in range(job.params.n)
        }
        total = sum(tokens.values())
        limit = self._max_tokens
        if limit is not None and self.queued_tokens and self.queued_tokens + total > limit:
            msg = (
                f"{self.queued_tokens} prompt tokens wait already, {total} more would be over the "
                f"{limit} that may; come back later, as Retry-After says"
            )
            raise QueueFullError(msg, retry_after_s=self.retry_after_s)
        self.num_open += job.num_answers
        self.queued_tokens += total
        return Ticket(num_open=job.num_answers, tokens=tokens)

    def began(self, ticket: Ticket, prompt: int, sample: int) -> None:
        """An answer has shown something, or has ended. Repeatable."""
        self.queued_tokens -= ticket.tokens.pop((prompt, sample), 0)

    def ended(self, ticket: Ticket, seconds: float) -> None:
        """An answer is whole; `seconds` it took from its admission."""
        ticket.num_open -= 1
        self.num_open -= 1
        self._mean_s = _MEMORY * self._mean_s + (1 - _MEMORY) * seconds

    def leave(self, ticket: Ticket) -> None:
        """The job ends, with all that was left of it. Repeatable."""
        self.num_open -= ticket.num_open
        self.queued_tokens -= sum(ticket.tokens.values())
        ticket.num_open = 0
        ticket.tokens = {}

    @property
    def retry_after_s(self) -> float:
        """About when a row will be free for somebody who comes now."""
        rounds = 1 + self.num_waiting / self._max_rows
        return min(_LONGEST_WAIT, max(1.0, rounds * self._mean_s))
