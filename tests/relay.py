"""A relay before a server, so that tests can let the server stall or vanish; no tests here."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class Relay:
    """Passes connections on, as long as it lives.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._server = (address.hostname, address.port)
        self._door = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._flows = threading.Event()
        self._flows.set()
        self._stall_after: bytes | None = None
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        self._threads = [self._start(self._accept)]

    def stall_after(self, mark: bytes) -> None:
        """Pass on no more of an answer once this has gone through."""
        self._stall_after = mark

    def close(self) -> None:
        """The server is gone: no new connections, and the open ones end. Repeatable."""
        self._stall_after = None  # what still comes must not stall again
        self._flows.set()
        for one in (self._door, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in list(self._threads):
            thread.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, function, *args) -> threading.Thread:
        thread = threading.Thread(target=function, args=args, daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._door.accept()
                server = socket.create_connection(self._server)
                self._open += [client, server]
                self._threads.append(self._start(self._pass, client, server))
                self._threads.append(self._start(self._pass, server, client, True))

    def _pass(self, here: socket.socket, there: socket.socket, answers: bool = False) -> None:
        with suppress(OSError):
            while data := here.recv(65536):
                there.sendall(data)
                mark = self._stall_after
                if answers and mark is not None and mark in data:
                    self._flows.clear()
                self._flows.wait()
        for one in (here, there):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
