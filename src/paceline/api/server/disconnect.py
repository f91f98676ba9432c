"""Clients that go before they have their answer: whatever is made for them ends.

The answer is raced against the connection's end, which is told by ASGI's `http.disconnect`.
Not for: streams (sse.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has left; nobody reads what would be said."""


async def gone(receive: Receive) -> None:
    """Return once the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Do the work while the client is there.

    Args:
        receive: of the request (`request.receive`), whose body has been read.
        work: cancelled when the client goes.

    Raises:
        ClientGoneError: it has gone.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.create_task(gone(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientGoneError
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)
