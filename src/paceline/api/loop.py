"""EngineLoop: one background thread that owns an engine, and a door to it for all other threads.

Whoever wants tokens submits requests with a *sink*, a callable that takes each `StepOutput` on the
loop's thread (so it must be quick: put it in a queue). The loop sleeps while the engine has no work.
If a step raises, the engine's state is unknown: every open request's sink gets an
`EngineStoppedError`, and nothing is accepted any more. A sink that raises loses only its own request.

Not for: text (completion.py) and waiting for results (llm.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from paceline.core.errors import EngineStoppedError, RequestError
from paceline.core.request import Request, StepOutput

if TYPE_CHECKING:
    from paceline.core.config import EngineConfig, ModelConfig
    from paceline.draft.base import DrafterSpec

log = logging.getLogger(__name__)

T = TypeVar("T")
Sink = Callable[[StepOutput | EngineStoppedError], object]


class Steppable(Protocol):
    """The part of `Engine` that the loop drives."""

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do anything."""
        ...

    def add(self, request: Request) -> int:
        """Queue a request; return its seed, or raise RequestError."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""
        ...

    def step(self, meanwhile: Callable[[], object]) -> list[StepOutput]:
        """Compute one step; call `meanwhile` at most once, when others may best have Python."""
        ...

    def close(self) -> None:
        """Give back what the engine holds."""
        ...


class ServedEngine(Steppable, Protocol):
    """The part of `Engine` that an LLM uses beside what its loop drives."""

    config: EngineConfig
    model_config: ModelConfig
    spec: DrafterSpec
    notes: tuple[str, ...]
    max_len: int

    def draw_seed(self) -> int:
        """A fresh seed."""
        ...

    def report(self) -> dict[str, float]:
        """Counters since the start."""
        ...


E = TypeVar("E", bound=Steppable)


@dataclass(frozen=True, slots=True)
class _Submit:
    requests: Sequence[Request]
    sink: Sink
    seeds: Future[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[Any], object]  # of the engine
    outcome: Future[Any]


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Command = _Submit | _Abort | _Call | _Close


class EngineLoop(Generic[E]):
    """Runs an engine in a thread of its own. All methods may be called from any thread."""

    def __init__(self, engine: E, *, prepare: Callable[[], object] = lambda: None) -> None:
        """Start the thread.

        Args:
            engine: from now on only this loop's thread may touch it.
            prepare: runs first on that thread, for settings that are kept per thread.
        """
        self._engine = engine
        self._prepare = prepare
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._made: list[StepOutput] = []  # by the last step, for the sinks
        # Guards `_stopped` against commands being put; may be entered again, by what a garbage
        # collection within it lets go.
        self._door = threading.RLock()
        self._stopped: EngineStoppedError | None = None
        self._closing = False
        self._step_began: float | None = None  # monotonic seconds; None: no step is running
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> EngineStoppedError | None:
        """Why the loop takes no more requests; None while it does."""
        return self._stopped

    @property
    def step_seconds(self) -> float:
        """How long the running step has taken so far; 0 between steps and without work."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def submit(self, requests: Sequence[Request], sink: Sink) -> Future[tuple[int, ...]]:
        """Queue requests, all or none, between two steps.

        Args:
            requests: to be added together.
            sink: gets every output of these requests, on the loop's thread; the last one of a
                request has a finish reason. If the loop stops, gets one `EngineStoppedError`
                for each request that is open.

        Returns:
            A future of the seeds used, in order. It raises RequestError if a request is refused,
            and then none of them was added.

        Raises:
            EngineStoppedError: the loop has stopped.
        """
        seeds: Future[tuple[int, ...]] = Future()
        self._put(_Submit(tuple(requests), sink, seeds))
        return seeds

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests soon; their sinks get a last output. Unknown ids are ignored."""
        with suppress(EngineStoppedError):  # then they have ended with the loop
            self._put(_Abort(tuple(request_ids)))

    def call(self, function: Callable[[E], T]) -> Future[T]:
        """Run a function of the engine on the loop's thread, between two steps.

        Raises:
            EngineStoppedError: the loop has stopped.
        """
        outcome: Future[T] = Future()
        self._put(_Call(function, outcome))
        return outcome

    def close(self) -> None:
        """Stop after the running step; open requests end with EngineStoppedError. Repeatable."""
        with suppress(EngineStoppedError):
            self._put(_Close())
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _put(self, command: _Command) -> None:
        with self._door:
            if self._stopped is not None:
                raise EngineStoppedError(str(self._stopped)) from self._stopped.__cause__
            self._commands.put(command)

    # -- on the loop's thread -----------------------------------------------------------------

    def _run(self) -> None:
        error = EngineStoppedError(
            "the engine was closed and takes no more requests; build a new one to go on"
        )
        try:
            self._prepare()
            while True:
                self._obey()
                if self._closing:
                    break
                self._step_began = time.monotonic()
                made = self._engine.step(self._hand_over)
                self._step_began = None
                self._hand_over()  # in case that step had nothing to compute
                self._made = made
                if not self._engine.has_work:
                    self._hand_over()
        except BaseException as failure:
            log.exception("the engine loop failed")
            error = EngineStoppedError(
                f"the engine loop failed and has stopped ({type(failure).__name__}: {failure}); "
                "its requests were ended; build a new engine to go on"
            )
            error.__cause__ = failure
        finally:
            self._step_began = None
            self._hand_over()
            self._stop(error)

    def _obey(self) -> None:
        """Carry out what was put; sleep until something is, if the engine has no work."""
        while not self._closing:
            try:
                command = (
                    self._commands.get_nowait() if self._engine.has_work else self._commands.get()
                )
            except Empty:
                return
            match command:
                case _Submit():
                    self._add(command)
                case _Abort():
                    for request_id in command.request_ids:
                        if request_id in self._sinks:  # not one that was refused, or has ended
                            self._engine.abort(request_id)
                case _Call():
                    _settle(command.outcome, partial(command.function, self._engine))
                case _Close():
                    self._closing = True

    def _add(self, command: _Submit) -> None:
        if any(request.id in self._sinks for request in command.requests):
            self._hand_over()  # the last output of an earlier one of that name

        def add_all() -> tuple[int, ...]:
            seeds: list[int] = []
            count = len(command.requests)
            try:
                for request in command.requests:
                    seeds.append(self._engine.add(request))  # noqa: PERF401 (counted below)
            except Exception as error:
                for request in command.requests[: len(seeds)]:
                    self._engine.abort(request.id)
                if count == 1 or not isinstance(error, RequestError):
                    raise
                msg = f"request {len(seeds) + 1} of {count}: {error}"
                raise type(error)(msg) from error
            # No output can exist before the next step, so sinks are in time.
            self._sinks.update((request.id, command.sink) for request in command.requests)
            return tuple(seeds)

        _settle(command.seeds, add_all)

    def _hand_over(self) -> None:
        """Give the sinks what the last step made.

        That is not done between two steps: whoever wakes up with it wants Python, and takes it at the
        engine's next call into PyTorch, which then waits until all of them are served. While the target
        computes, Python is theirs.
        """
        made, self._made = self._made, []
        for output in made:
            self._deliver(output)

    def _deliver(self, output: StepOutput) -> None:
        sink = self._sinks.get(output.request_id)
        if sink is None:
            return
        if output.finish_reason is not None:
            del self._sinks[output.request_id]
        try:
            sink(output)
        except Exception:
            log.exception("request %s: its sink failed; it is aborted", output.request_id)
            if output.finish_reason is None:
                self._sinks[output.request_id] = _deaf
                self._commands.put(_Abort((output.request_id,)))  # later: a step may be running

    def _stop(self, error: EngineStoppedError) -> None:
        with self._door:
            self._stopped = error
        sinks, self._sinks = list(self._sinks.values()), {}
        for sink in sinks:
            try:
                sink(error)
            except Exception:
                log.exception("a sink failed while the loop was stopping")
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                break
            match command:
                case _Submit(seeds=future) | _Call(outcome=future):
                    if future.set_running_or_notify_cancel():
                        future.set_exception(error)
        try:
            self._engine.close()
        except Exception:
            log.exception("the engine failed while it was closed")
        del self._engine  # its memory goes back although somebody may still hold this loop


def _deaf(_: StepOutput | EngineStoppedError) -> None:
    """The sink of a request whose own has failed."""


def _settle(future: Future[T], function: Callable[[], T]) -> None:
    """Run a function into a future; an error is the future's, not the loop's."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001 (whoever waits raises it)
        future.set_exception(error)
