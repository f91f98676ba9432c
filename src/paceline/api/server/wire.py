"""Wire: what the engine makes of a job, in the words that a client waits for.

Not for: how they are framed and sent (sse.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from paceline.api.results import Chunk
    from paceline.api.server.service import Stream

E_co = TypeVar("E_co", covariant=True)
E = TypeVar("E")


class Events(Protocol[E_co]):
    """Makes the wire's events of the engine's chunks."""

    def take(self, chunk: Chunk) -> Sequence[E_co]:
        """For one chunk."""
        ...

    def end(self) -> Sequence[E_co]:
        """After the last."""
        ...


class Wire(Generic[E]):
    """The events of an open stream. A class, as a generator that never began closes nothing.

    Args:
        stream: opened; closed with the wire.
        events: makes what comes of it.
        first: what is told before anything is made.
        failed: makes the last events when the engine fails; None: its error is raised.
        left: called when the wire is closed, however it ended.
    """

    def __init__(
        self,
        stream: Stream,
        events: Events[E],
        *,
        first: Iterable[E] = (),
        failed: Callable[[Exception], Iterable[E]] | None = None,
        left: Callable[[], object] = lambda: None,
    ) -> None:
        self._stream = stream
        self._events = events
        self._failed = failed
        self._left = left
        self._ready = deque(first)
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> E:
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
            try:
                chunk = await self._stream.__anext__()
            except StopAsyncIteration:
                self._ended = True
                self._ready.extend(self._events.end())
            except Exception as error:
                self._ended = True
                if self._failed is None:
                    raise
                self._ready.extend(self._failed(error))
            else:
                self._ready.extend(self._events.take(chunk))
        return self._ready.popleft()

    async def aclose(self) -> None:
        """End what the engine still makes."""
        self._stream.close()
        self._left()
