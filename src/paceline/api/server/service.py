"""Service: jobs in, chunks out, over one LLM; what is admitted, counted, drained and watched.

    async with await service.run(job) as stream:     # admitted and taken by the engine
        async for chunk in stream:
            ...

Leaving a stream early ends its requests in the engine. Nothing here knows HTTP. Event loop only.
Not for: wire formats, and the process (life.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from paceline.api.server.admission import Admission, Ticket
from paceline.api.server.errors import QueueFullError, UnavailableError
from paceline.api.server.job import Job
from paceline.api.server.listener import Deaf, Listener
from paceline.api.server.settings import ServerSettings
from paceline.core.errors import EngineStoppedError, RequestError

if TYPE_CHECKING:
    from paceline.api.answers import Answers
    from paceline.api.llm import LLM
    from paceline.api.results import Chunk

log = logging.getLogger(__name__)

_REPORT_S = 2.0  # a step of a large model takes less


class _Progress:
    """How far one answer is that is not whole yet."""

    __slots__ = ("last", "num_tokens")

    def __init__(self) -> None:
        self.last = 0.0  # when tokens of it came last
        self.num_tokens = 0  # handed over


class Stream:
    """Chunks of one job; an async iterator, a context, and awaited until the engine has the job."""

    def __init__(self, service: Service, job: Job) -> None:
        self.job = job
        self._service = service
        self._answers: Answers | None = None
        self._open = self._aborted = False
        self._began = 0.0
        self._unfinished: dict[tuple[int, int], _Progress] = {}  # by prompt and sample

    def __await__(self) -> Generator[None, None, Self]:
        return self._enter().__await__()

    async def _enter(self) -> Self:
        if not self._open:
            self._open = True
            service = self._service
            try:
                self._ticket = service.admit(self.job)
            except BaseException:
                self._open = False
                raise
            self._began = time.perf_counter()
            self._events = asyncio.get_running_loop()
            self._unfinished = {key: _Progress() for key in self._ticket.tokens}
            service.opened(self)
            try:
                self._answers = await service.llm.submit(
                    self.job.prompts,
                    self.job.params,
                    constraint=self.job.constraint,
                    scope=self.job.scope,
                    shows_trees=self.job.shows_trees,
                    prompt_logprobs=self.job.prompt_logprobs,
                    lists_steps=service.lists_steps and self.job.num_answers == 1,
                )
            except RequestError:
                self._unfinished = {}  # refused, as if it had not been admitted
                self.close()
                raise
            except BaseException as error:
                self._end(_why(error))
                raise
            if self._aborted:
                self._answers.abort()
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk.

        Raises:
            UnavailableError: not admitted (only where the stream was not awaited before).
            RequestError: the engine refuses the job (the same).
            EngineStoppedError: the engine has stopped.
        """
        if self._answers is None:
            await self._enter()
        assert self._answers is not None, "who entered has answers"
        try:
            chunk = await self._answers.__anext__()
        except BaseException as error:
            self._end(_why(error))
            raise
        self._count(chunk)
        return chunk

    def _count(self, chunk: Chunk) -> None:
        now = time.perf_counter()
        key = chunk.prompt_index, chunk.sample_index
        num_tokens = len(chunk.token_ids)
        if num_tokens:
            one = self._unfinished[key]
            listener = self._service.listener
            if one.num_tokens:
                listener.came(num_tokens, now - one.last)
            else:
                self._service.admission.began(self._ticket, *key)
                listener.began(self.job, chunk.prompt_index, num_tokens, now - self._began)
            one.last = now
            one.num_tokens += num_tokens
        if chunk.result is not None:
            service = self._service
            del self._unfinished[key]
            service.admission.began(self._ticket, *key)  # one that ended without a token
            service.admission.ended(self._ticket, now - self._began)
            service.listener.ended(chunk.result, self.job, now - self._began)

    def abort(self) -> None:
        """Let the answers end as they are; their last chunks still come."""
        self._aborted = True
        if self._answers is not None:
            self._answers.abort()

    def close(self) -> None:
        """End what is unfinished, once. Nothing more comes."""
        self._end("abort")

    def _end(self, why: str) -> None:
        if self._open:
            self._let_go()
            self._tell_left(why)()

    def _let_go(self) -> None:
        self._open = False
        self._service.closed(self)
        self._service.admission.leave(self._ticket)
        if self._answers is not None:
            self._answers.close()

    def _tell_left(self, why: str) -> Callable[[], None]:
        """What tells the listener of the answers that are not whole; without this stream."""
        left, self._unfinished = self._unfinished, {}
        listener, job, seconds = self._service.listener, self.job, time.perf_counter() - self._began

        def tell() -> None:
            for (prompt, _), one in left.items():
                listener.left(job, prompt, one.num_tokens, seconds, why)

        return tell

    def __del__(self) -> None:
        if self._open:
            self._let_go()
            # What the collector interrupts may hold the lock of a metric, so nobody is told from here.
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._events.call_soon_threadsafe(self._tell_left("abort"))

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    async def __aenter__(self) -> Self:
        return await self._enter()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _why(error: BaseException) -> str:
    """How answers end whose reader was stopped by this: it was cancelled, or there is no engine."""
    return "error" if isinstance(error, Exception) else "abort"


class Service:
    """One LLM behind a door with a queue of limited length.

    Args:
        llm: answers; it stays the caller's, who closes it.
        settings: limits and times.
        listener: told of refusals, chunks and results.
    """

    def __init__(
        self, llm: LLM, settings: ServerSettings, *, listener: Listener | None = None
    ) -> None:
        self.llm = llm
        self.settings = settings
        self.listener: Listener = Deaf() if listener is None else listener
        self.lists_steps = settings.per_request_spec_decode_metrics == "detailed"
        self.admission = Admission(
            max_rows=llm.config.cache.max_rows,
            max_queued_requests=settings.max_queued_requests,
            max_queued_tokens=settings.max_queued_tokens,
        )
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()  # a dropped one must end
        self._idle = asyncio.Event()
        self._idle.set()
        self._report: dict[str, float] = {}

    def run(self, job: Job) -> Stream:
        """Let a job be answered.

        Returns:
            Its stream. Awaiting it returns once the job is admitted and the engine has taken it,
            and raises what stands against it; iterating gives the chunks.
        """
        return Stream(self, job)

    def admit(self, job: Job) -> Ticket:
        """Give a job its place, or raise why there is none."""
        if (stopped := self.llm.stopped) is not None:
            self.listener.refused("engine_stopped")
            raise EngineStoppedError(str(stopped)) from stopped
        try:
            return self.admission.enter(job)
        except UnavailableError as error:
            self.listener.refused("queue_full" if isinstance(error, QueueFullError) else "draining")
            raise

    def opened(self, stream: Stream) -> None:
        """A stream was admitted."""
        self._streams.add(stream)
        self._idle.clear()

    def closed(self, stream: Stream) -> None:
        """A stream has ended, or was left."""
        self._streams.discard(stream)
        if not self._streams:
            self._idle.set()

    # -- life ---------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether the server ends and takes no more jobs."""
        return self.admission.draining

    def stop_admitting(self) -> None:
        """From now on every new job is refused; those that are open go on."""
        self.admission.draining = True

    async def drain(self, seconds: float) -> bool:
        """Take no more jobs, give the open ones some time, then end them.

        Returns:
            Whether all of them ended by themselves.
        """
        self.stop_admitting()
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            self.abort_all()
            return False
        return True

    def abort_all(self) -> None:
        """Let every open job end as it is; its last chunk says "abort"."""
        for stream in list(self._streams):
            stream.abort()

    @property
    def unhealthy(self) -> str | None:
        """Why the engine cannot be relied on; None: it can."""
        if self.llm.stopped is not None:
            return str(self.llm.stopped)
        seconds = self.llm.step_seconds
        if seconds > self.settings.watchdog_timeout:
            return (
                f"the engine's step has taken {seconds:.0f} s and has not ended; "
                f"{self.settings.watchdog_timeout:g} s are expected at most; ask another replica, and "
                "restart this one if it stays so, or give steps more time with --watchdog-timeout"
            )
        return None

    @property
    def unready(self) -> str | None:
        """Why requests should go elsewhere; None: they are welcome."""
        if self.draining:
            return "the server is shutting down and takes no more requests; ask another replica"
        return self.unhealthy

    # -- figures ------------------------------------------------------------------------------

    async def report(self) -> dict[str, float]:
        """The engine's counters; those of the last time where the engine does not answer soon."""
        try:
            asked = asyncio.wrap_future(self.llm.ask_report())
            self._report = await asyncio.wait_for(asked, _REPORT_S)
        except (EngineStoppedError, TimeoutError):
            log.debug("the engine gave no report", exc_info=True)
        return self._report

    def load(self) -> dict[str, int]:
        """Answers that are made and that wait, and the prompt tokens that wait."""
        waiting = self.admission.num_waiting
        return {
            "num_requests_running": self.admission.num_open - waiting,
            "num_requests_waiting": waiting,
            "num_queued_tokens": self.admission.queued_tokens,
            "server_load": self.admission.num_open,
        }
