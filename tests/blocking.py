"""The async client, called like the sync one: what is shown of one is shown of both. No tests here."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import AsyncOpenAI, OpenAI

CLIENTS = ("sync", "async")


class Blocking:
    """Anything async: its coroutines are awaited, its iterators and contexts are plain ones."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self._target = target
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return self._plain(getattr(self._target, name))

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._plain(self._target(*args, **options))

    def __enter__(self) -> Any:
        return self._plain(self._target.__aenter__())

    def __exit__(self, *error: object) -> Any:
        return self._plain(self._target.__aexit__(*error))

    def __iter__(self) -> Iterator[Any]:
        items = self._target.__aiter__()
        while True:
            try:
                item = self._plain(items.__anext__())
            except StopAsyncIteration:
                return
            yield item

    def _plain(self, found: Any) -> Any:
        if inspect.isawaitable(found):
            found = self._awaited(found)
        is_async = hasattr(found, "__aiter__") or hasattr(found, "__aenter__")
        is_client = type(found).__name__.startswith("Async")
        return Blocking(found, self._runner) if is_async or is_client or callable(found) else found

    def _awaited(self, found: Any) -> Any:
        async def run() -> Any:
            return await found

        return self._runner.run(run())


@contextmanager
def openai_client(kind: str, url: str, key: str = "none") -> Iterator[Any]:
    """The official client, of either kind.

    Args:
        kind: one of `CLIENTS`.
        url: ends with /v1.
        key: sent with every request.
    """
    if kind == "sync":
        with OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            yield client
        return
    with asyncio.Runner() as runner:
        client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
        with Blocking(client, runner):
            yield Blocking(client, runner)
