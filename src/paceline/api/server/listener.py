"""Listener: who is told what happens to a service's jobs; metrics are one. Event loop only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from paceline.api.results import Result
    from paceline.api.server.job import Job


class Listener(Protocol):
    """Who wants to know what happens, quickly: it is called between chunks."""

    def refused(self, reason: str) -> None:
        """A job was not admitted: queue_full, draining or engine_stopped."""
        ...

    def began(self, job: Job, prompt_index: int, num_tokens: int, seconds: float) -> None:
        """The first tokens of an answer to one of a job's prompts came, so long after its admission."""
        ...

    def came(self, num_tokens: int, seconds: float) -> None:
        """More tokens of an answer came, so long after those before them."""
        ...

    def ended(self, result: Result, job: Job, seconds: float) -> None:
        """An answer is whole, so long after its admission."""
        ...

    def left(self, job: Job, prompt_index: int, num_tokens: int, seconds: float, why: str) -> None:
        """An answer will never be whole, so long after its admission; told once, instead of `ended`.

        Args:
            job: whose answer it is.
            prompt_index: to which of its prompts.
            num_tokens: that were handed over.
            seconds: since the admission.
            why: "abort": its reader has left; "error": the engine has stopped.
        """
        ...


class Deaf:
    """The default: nobody listens."""

    def refused(self, reason: str) -> None:
        """Do nothing."""

    def began(self, job: Job, prompt_index: int, num_tokens: int, seconds: float) -> None:
        """Do nothing."""

    def came(self, num_tokens: int, seconds: float) -> None:
        """Do nothing."""

    def ended(self, result: Result, job: Job, seconds: float) -> None:
        """Do nothing."""

    def left(self, job: Job, prompt_index: int, num_tokens: int, seconds: float, why: str) -> None:
        """Do nothing."""
