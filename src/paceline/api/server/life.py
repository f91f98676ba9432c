"""The server's process: its socket, its signals, and how it ends.

    running    requests are taken
    draining   after the first SIGTERM, SIGINT or SIGHUP: the socket is closed, what runs may end by itself
    ending     after the time for that, or a second signal: what still runs is ended, and told so; a third
               signal does not wait for that (a further SIGHUP is none: a terminal that closes sends several)

A process that was asked to end exits with 0; one whose engine loop has died with 1, soon after.
Not for: an app inside another program, which has its own signals (app.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from fastapi import FastAPI

from paceline.api.server.service import Service
from paceline.api.server.settings import ServerSettings
from paceline.api.server.uvicorn_server import LAST_WORDS_S, Server, config_of
from paceline.core.errors import ConfigError

log = logging.getLogger(__name__)

_LOOK_S = 0.2  # how often the engine loop is looked at
_GRACE_S = 3.0  # for connections to close once their answers have ended
_HANG_UP = getattr(signal, "SIGHUP", None)  # Windows has none
# How long a thread that computes may keep others from Python. A request needs it several times before its
# first token, each time against the engine's thread: with Python's 5 ms the wait is felt.
_SWITCH_S = 0.0005
_MOST_FILES = 65_536


def bound(settings: ServerSettings) -> socket.socket:
    """The address, taken but not yet listened at: whoever comes is refused until requests are taken.

    Raises:
        ConfigError: it is in use, not this machine's, or not allowed.
    """
    if settings.uds is not None:
        return _bound_path(settings.uds)
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except BaseException:
            made.close()
            raise
    except (OSError, UnicodeError) as error:  # the latter of a host that is no name
        why = getattr(error, "strerror", None) or error
        msg = (
            f"cannot listen at {settings.host} port {settings.port} ({why}); another --host and --port "
            "are possible, and --port 0 takes a free one"
        )
        raise ConfigError(msg) from error
    return made


def _bound_path(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
                if probe.connect_ex(path) == 0:
                    msg = f"another server listens at {path}; name another --uds, or end that one"
                    raise ConfigError(msg)  # noqa: TRY301 (the socket is closed below)
            Path(path).unlink()  # one that has ended left it
        made.bind(path)
    except OSError as error:
        made.close()
        why = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why = "a file that is no socket has that name"
        msg = (
            f"cannot listen at the Unix socket {path} ({why}); a new name in a folder of yours is "
            "possible, about a hundred bytes long with the folder; name another --uds"
        )
        raise ConfigError(msg) from error
    except BaseException:
        made.close()
        raise
    return made


def address_of(listening: socket.socket, settings: ServerSettings) -> str:
    """What a client has to be told, as a URL."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = listening.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{settings.root_path}"


def port_of(listening: socket.socket) -> int:
    """The port that was taken."""
    return int(listening.getsockname()[1])


class Life:
    """One run of a server.

    Args:
        app: what is served.
        service: the app's.
        listening: from `bound`; closed at the end.
        ready: called once requests are taken.
    """

    def __init__(
        self,
        app: FastAPI,
        service: Service,
        listening: socket.socket,
        *,
        ready: Callable[[], object] = lambda: None,
    ) -> None:
        self._service = service
        self._listening = listening
        self._settings = settings = service.settings
        self._num_signals = 0
        self._failed = False
        self._draining: asyncio.Task[None] | None = None
        graceful_s = int(settings.drain_timeout + _GRACE_S + 1)
        self._server = Server(config_of(app, settings, graceful_s=graceful_s), ready)

    def run(self) -> int:
        """Serve until a signal or the engine's end; return the exit code."""
        loop_factory = _loop_factory()
        with quick_turns(), many_connections(), asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(self._run())

    async def _run(self) -> int:
        events = asyncio.get_running_loop()
        for number in _signals():
            events.add_signal_handler(number, self._signalled, number)
        watch = asyncio.create_task(self._watch())
        try:
            await self._server.serve([self._listening])
        finally:
            watch.cancel()
            if self._draining is not None:
                self._draining.cancel()
            self._service.abort_all()
            self._unlink()
        return 1 if self._failed else 0

    def _unlink(self) -> None:
        if self._settings.uds is not None:
            Path(self._settings.uds).unlink(missing_ok=True)

    def _signalled(self, number: int) -> None:
        if number == _HANG_UP and self._num_signals:
            return
        self._num_signals += 1
        name = signal.Signals(number).name
        if self._num_signals == 1:
            waiting = self._service.admission.num_open
            log.info(
                "%s: no more requests are taken; %d answers have %g s to end (a second signal ends "
                "them at once)",
                name,
                waiting,
                self._settings.drain_timeout,
            )
            self._service.stop_admitting()
            self._draining = asyncio.create_task(self._drain())
            self._server.should_exit = True
        else:
            log.info("%s again: ending at once", name)
            self._service.abort_all()
            self._server.should_exit = True
            wait = LAST_WORDS_S if self._num_signals == 2 else 0
            asyncio.get_running_loop().call_later(wait, self._force)

    def _force(self) -> None:
        self._server.force_exit = True

    async def _drain(self) -> None:
        if not await self._service.drain(self._settings.drain_timeout):
            log.warning("answers were ended: they had not come to their end in time")
        # What is left are clients that do not take what was made for them.
        await asyncio.sleep(_GRACE_S)
        self._server.force_exit = True

    async def _watch(self) -> None:
        """End the process once the engine's loop has."""
        while self._service.llm.stopped is None:  # noqa: ASYNC110 (another thread sets it)
            await asyncio.sleep(_LOOK_S)
        if self._server.should_exit:
            return
        self._failed = True
        stopped = self._service.llm.stopped
        log.critical("the server ends: %s", stopped, exc_info=stopped)
        self._service.stop_admitting()
        await asyncio.sleep(LAST_WORDS_S)
        self._server.should_exit = True
        await asyncio.sleep(_GRACE_S)
        self._server.force_exit = True


def _signals() -> list[signal.Signals]:
    """The signals that end a server; not a hang-up under `nohup`, which asks that it be ignored."""
    found = [signal.SIGTERM, signal.SIGINT]
    if _HANG_UP is not None and signal.getsignal(_HANG_UP) != signal.SIG_IGN:
        found.append(_HANG_UP)
    return found


@contextlib.contextmanager
def quick_turns() -> Iterator[None]:
    """For the time of the context threads take turns more often; the whole process's setting."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def many_connections() -> Iterator[None]:
    """For the time of the context as many are possible as the system allows this process.

    A shell's own limit, often 1,024 open files, would let no further client in; it exists for programs
    that cannot handle more.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        yield
        return
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        yield
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def close_or_leave(close: Callable[[], object], seconds: float) -> bool:
    """Close something that waits for the engine's step; False: it did not come back in time."""
    closing = threading.Thread(target=close, name="paceline-close", daemon=True)
    closing.start()
    closing.join(seconds)
    return not closing.is_alive()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.new_event_loop
