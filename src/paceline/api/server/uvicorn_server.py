"""uvicorn, as this server uses it: its options made of our settings, and its server without signals.

Not for: when it ends (life.py), and what a connection may send (connection.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from paceline.api.server.connection import limited
from paceline.api.server.settings import ServerSettings

LAST_WORDS_S = 1.0  # for answers to those whose engine has died, or whose answers were ended
_BACKLOG = 2048


def config_of(app: FastAPI, settings: ServerSettings, *, graceful_s: int) -> uvicorn.Config:
    """uvicorn's options.

    Args:
        app: what is served.
        settings: of the app's service.
        graceful_s: seconds that answers have to end once the server shall, after which they are cancelled.
    """
    return uvicorn.Config(
        app,
        http=limited(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=settings.access_log,
        server_header=False,
        root_path=settings.root_path,
        backlog=_BACKLOG,
        timeout_keep_alive=settings.timeout_keep_alive,  # type: ignore[arg-type]
        timeout_graceful_shutdown=graceful_s,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=2 if settings.ssl_ca_certs is not None else 0,
    )


class Server(uvicorn.Server):
    """uvicorn's, which leaves signals to others; `serve` it on sockets from `life.bound`.

    Args:
        config: from `config_of`.
        ready: called once requests are taken.
    """

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so; end in order where that fails."""
        await super().startup(sockets)
        if not self.started or self.should_exit:
            return
        try:
            self._ready()
        except BaseException:
            await self.shutdown(sockets)
            raise

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End; where that cannot wait, clients are left before tasks are cancelled, which would fail."""
        await super().shutdown(sockets)
        if not self.force_exit:
            return
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=LAST_WORDS_S)
        await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield
