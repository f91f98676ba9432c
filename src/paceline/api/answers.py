"""Answers: chunks on their way from the engine's thread to a coroutine.

    engine's thread                     event loop
    Submitted -> Relay.put  ~one call~> Relay -> Inbox.put -> Inbox.take -> Answers

All that a step hands over wakes the event loop once, and nobody's slowness reaches the engine: its
thread appends to a queue and goes on. What a reader has not taken yet is joined, so that it holds no
more than the answer itself does.

Not for: threads that wait (llm.py has a queue for those).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

from paceline.api.completion import Completion
from paceline.api.loop import EngineLoop
from paceline.api.results import Chunk, joined
from paceline.api.submission import Item, Submitted
from paceline.core.errors import PacelineError

_MOST_APART = 64  # chunks of a few answers that wait side by side before they are joined


class Inbox:
    """What one reader has yet to take. Event loop only."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._most = _MOST_APART
        self._error: PacelineError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """Add a chunk, or an error that ends everything."""
        if isinstance(item, Chunk):
            self._chunks.append(item)
            if len(self._chunks) > self._most:
                self._chunks = _by_answer(self._chunks)
                # A reader of many answers has one chunk of each: joining them anew for every chunk that
                # comes would take ever longer.
                self._most = max(_MOST_APART, 2 * len(self._chunks))
        else:
            self._error = item
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def take(self) -> list[Chunk]:
        """All that has come, one chunk per answer; empty if nothing has.

        Raises:
            PacelineError: it came in place of a chunk.
        """
        taken = self._chunks
        if not taken and self._error is not None:
            raise self._error
        self._chunks = []
        return taken if len(taken) < 2 else _by_answer(taken)

    def coming(self) -> asyncio.Future[None]:
        """What to wait for when nothing has come."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


def _by_answer(chunks: Sequence[Chunk]) -> list[Chunk]:
    """One chunk per answer, in the order in which answers appear."""
    found: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        found.setdefault((chunk.prompt_index, chunk.sample_index), []).append(chunk)
    return [joined(of_one) for of_one in found.values()]


class Relay:
    """The way from an engine's thread to the inboxes of one event loop."""

    def __init__(self, events: asyncio.AbstractEventLoop) -> None:
        self._events = events
        self._items: deque[tuple[Inbox, Item]] = deque()
        self._called = False

    def put(self, inbox: Inbox, item: Item) -> None:
        """Hand over; for the engine's thread. Where the event loop has ended, nobody waits for it."""
        self._items.append((inbox, item))
        if self._called:
            return
        self._called = True
        try:
            self._events.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            if not self._events.is_closed():
                raise

    def _deliver(self) -> None:
        self._called = False  # before looking: whatever comes from now on calls again
        while self._items:
            inbox, item = self._items.popleft()
            inbox.put(item)


class Answers:
    """Chunks of a call's answers; an async iterator that ends with the last answer.

    Whoever leaves early closes it, which ends the requests; so does dropping it.
    """

    def __init__(
        self, loop: EngineLoop[Any], completions: Sequence[Completion], relay: Relay
    ) -> None:
        self._open = False
        self._inbox = Inbox()
        self._submitted = Submitted(loop, completions, partial(relay.put, self._inbox))
        self._ready: deque[Chunk] = deque()
        self._left = len(completions)

    @classmethod
    async def submit(
        cls, loop: EngineLoop[Any], completions: Sequence[Completion], relay: Relay
    ) -> Self:
        """Return once the engine has taken the requests, which then wait or run.

        Raises:
            RequestError: one of them cannot be served; none was taken.
            EngineStoppedError: the engine has failed, or was closed.
        """
        answers = cls(loop, completions, relay)
        seeds = answers._submitted.__enter__()
        answers._open = bool(completions)
        try:
            await asyncio.wrap_future(seeds)
        except BaseException:
            answers.close()
            raise
        return answers

    def abort(self) -> None:
        """Let the answers end as they are; what remains of them still comes."""
        if self._open:
            self._submitted.abort()

    def close(self) -> None:
        """End what is unfinished; nothing more comes. Repeatable."""
        if self._open:
            self._open = False
            self._ready.clear()
            self._submitted.__exit__()

    def __del__(self) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk.

        Raises:
            PacelineError: the engine has stopped, or an answer's text could not be made.
        """
        while not self._ready:
            if not self._open:
                raise StopAsyncIteration
            self._ready.extend(self._inbox.take())
            if not self._ready:
                await self._inbox.coming()
        chunk = self._ready.popleft()
        if chunk.result is not None:
            self._left -= 1
            if not self._left:
                self.close()
        return chunk
