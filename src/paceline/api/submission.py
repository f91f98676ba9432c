"""Submitted: the open requests of one call, aborted if the caller leaves before they have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from paceline.api.completion import Completion
from paceline.api.loop import EngineLoop
from paceline.api.results import Chunk
from paceline.core.errors import EngineStoppedError, PacelineError
from paceline.core.request import Request, StepOutput

Item = Chunk | PacelineError  # what a caller waits for


class Submitted:
    """Requests that are open while the context is; whatever is unfinished then is aborted."""

    def __init__(
        self,
        loop: EngineLoop[Any],
        completions: Sequence[Completion],
        put: Callable[[Item], object],
    ) -> None:
        self._loop = loop
        self._open = {c.request.id: c for c in completions}
        self._put = put
        self._aborted = False

    def __enter__(self) -> Future[tuple[int, ...]]:
        requests: list[Request] = [c.request for c in self._open.values()]
        return self._loop.submit(requests, self._take)

    def __exit__(self, *_: object) -> None:
        self.abort()

    def abort(self) -> None:
        """End what is unfinished; its last outputs still come. Repeatable."""
        unfinished = () if self._aborted else tuple(self._open)
        self._aborted = True
        if unfinished:
            self._loop.abort(unfinished)

    def _take(self, output: StepOutput | EngineStoppedError) -> None:
        """Runs on the loop's thread."""
        if isinstance(output, EngineStoppedError):
            self._put(output)
            return
        try:
            chunk = self._open[output.request_id].accept(output)
        except Exception as error:
            msg = f"the answer's text could not be made ({type(error).__name__}: {error})"
            self._put(PacelineError(msg))
            raise  # the loop logs it and aborts the request
        if chunk.result is not None:
            del self._open[output.request_id]
        self._put(chunk)


def opened(item: Item) -> Chunk:
    """The chunk that was waited for; raises the error that came in its place."""
    if isinstance(item, PacelineError):
        raise item
    return item
