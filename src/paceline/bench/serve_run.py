"""Runs of a server bench: every variant of the requests under every load, several times, in turns."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.bench.serve_client import Answer, Endpoint, ask, served_models
from paceline.bench.serve_connection import ExchangeError
from paceline.bench.serve_counters import NOTHING_COUNTED, Counters, read_counters
from paceline.bench.serve_http import Address, HttpClient
from paceline.bench.serve_load import Load, Measured, put_load
from paceline.bench.serve_prompts import Call, bodies
from paceline.core.errors import PacelineError

Progress = Callable[[int, int], None]
_SETTLE_S = 0.05
_SETTLE_TIMES = 20
_MOST_INFO = 100_000  # characters of /server_info that a record keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How a server is measured."""

    url: str
    model: str | None  # None: the first that the server lists
    endpoint: Endpoint
    loads: Sequence[Load]
    num_prompts: int
    max_tokens: int
    temperature: float
    seed: int
    repeats: int
    warmup: int
    timeout: float  # seconds a request
    salt: bool  # a cache_salt per run
    extra: Mapping[str, object]  # more of every request's body
    variants: Mapping[str, Mapping[str, object]]  # name -> more of the body; {"": {}}: just one
    goodput: Mapping[str, float]  # metric -> most milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRun:
    """One run: one variant, one load, one repeat."""

    variant: str
    load: Load
    repeat: int
    calls: Sequence[Call]
    measured: Measured
    counters: Counters | None  # of this run; None: the server has none
    note: str | None = None  # why they cannot be used


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeReport:
    """All runs, and what the server said about itself."""

    model: str
    server: Mapping[str, Any]
    runs: Sequence[ServeRun] = ()
    interrupted: bool = False  # Ctrl-C: the run under way, and those after it, are missing


def run(
    settings: ServeSettings,
    calls: Callable[[int, int], Sequence[Call]],
    *,
    api_key: str | None = None,
    progress: Progress = lambda done, total: None,  # noqa: ARG005
) -> ServeReport:
    """Measure a server.

    A run that completes no request is the last one: the server is gone, or takes none of them. So is
    the one before Ctrl-C, if there is any; hours of measuring are not thrown away.

    Args:
        settings: how.
        calls: (number of the run, number of requests) -> what is asked; the same number for all
            variants, so that they are asked the same.
        api_key: sent as a bearer token.
        progress: told after each counted answer.

    Raises:
        PacelineError: the server cannot be reached, or answers no warm-up request.
        KeyboardInterrupt: before the first run ended.
    """
    reports: list[ServeReport] = []
    try:
        asyncio.run(_run(settings, calls, api_key, progress, reports))
    except KeyboardInterrupt:
        if not reports or not reports[-1].runs:
            raise
        return replace(reports[-1], interrupted=True)
    return reports[-1]


async def _run(
    settings: ServeSettings,
    calls: Callable[[int, int], Sequence[Call]],
    api_key: str | None,
    progress: Progress,
    reports: list[ServeReport],
) -> None:
    """Run everything; `reports` gets the report as it grows."""
    address = Address.parse(settings.url)
    async with HttpClient(address, api_key=api_key, timeout=settings.timeout) as client:
        model = settings.model or str((await served_models(client))[0]["id"])
        bench = _Bench(settings, client, model, progress)
        reports.append(ServeReport(model=model, server=await _about(client)))
        for repeat in range(settings.repeats):
            for number, load in enumerate(settings.loads):
                turn = repeat * len(settings.loads) + number
                asked = calls(turn, settings.num_prompts + settings.warmup)
                names = list(settings.variants)
                for name in names if turn % 2 == 0 else names[::-1]:
                    run = await bench.run(name, load, repeat, asked)
                    reports.append(replace(reports[-1], runs=(*reports[-1].runs, run)))
                    if not completed(run):
                        return


class _Bench:
    def __init__(
        self, settings: ServeSettings, client: HttpClient, model: str, progress: Progress
    ) -> None:
        self._settings = settings
        self._client = client
        self._model = model
        self._progress = progress
        self._done = 0
        runs = settings.repeats * len(settings.loads) * len(settings.variants)
        self._total = runs * settings.num_prompts
        progress(0, self._total)

    async def run(self, variant: str, load: Load, repeat: int, asked: Sequence[Call]) -> ServeRun:
        settings = self._settings
        counted, warm = asked[: settings.num_prompts], asked[settings.num_prompts :]
        await self._warm_up(self._bodies(warm, variant), load)
        sent = self._bodies(counted, variant)
        before = await self._counters()
        measured = await put_load(
            lambda i: ask(self._client, settings.endpoint, sent[i]),
            len(sent),
            load,
            seed=settings.seed + repeat,
            progress=self._advance,
        )
        note = None
        counters = None if before is None else await self._settled()
        if counters is not None and before is not None:
            counters = counters.since(before)
            note = "the server's counters went back during the run" if counters is None else None
        return ServeRun(
            variant=variant,
            load=load,
            repeat=repeat,
            calls=counted,
            measured=measured,
            counters=counters,
            note=note,
        )

    def _advance(self) -> None:
        self._done += 1
        self._progress(self._done, self._total)

    def _bodies(self, calls: Sequence[Call], variant: str) -> list[bytes]:
        """Requests of one run; a salt of its own keeps it from what others left in caches."""
        settings = self._settings
        salt = {"cache_salt": f"bench-{secrets.token_hex(8)}"} if settings.salt else {}
        return bodies(
            calls,
            model=self._model,
            endpoint=settings.endpoint,
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
            extra={**salt, **settings.extra, **settings.variants[variant]},
        )

    async def _warm_up(self, sent: Sequence[bytes], load: Load) -> None:
        if not sent:
            return
        at_once = Load(concurrency=load.concurrency or 1)
        measured = await put_load(
            lambda i: ask(self._client, self._settings.endpoint, sent[i]), len(sent), at_once
        )
        failures = [a.failure for a in measured.answers if a.failure is not None]
        if len(failures) == len(sent):
            first = failures[0]
            hint = ""
            if first.kind in {"HTTP 400", "HTTP 422"} and self._settings.salt:
                hint = " (a server that takes no unknown fields needs --no-salt)"
            msg = (
                f"the server answered none of {len(sent)} warm-up requests; the first one: "
                f"{first.kind}: {first.message}{hint}"
            )
            raise PacelineError(msg)

    async def _counters(self) -> Counters | None:
        try:
            body = await self._client.get("/metrics")
        except ExchangeError:
            return None
        if body.status != 200:
            return None
        return read_counters(body.text, self._model) or NOTHING_COUNTED

    async def _settled(self) -> Counters | None:
        """Counters once they stand still: a server may add an answer's up after its end."""
        last = await self._counters()
        for _ in range(_SETTLE_TIMES):
            await asyncio.sleep(_SETTLE_S)
            now = await self._counters()
            if now == last:
                break
            last = now
        return last


async def _about(client: HttpClient) -> dict[str, Any]:
    """What the server tells about itself; nothing of it is needed."""
    found: dict[str, Any] = {}
    for name in ("version", "server_info"):
        try:
            body = await client.get(f"/{name}")
            if body.status == 200 and len(body.text) <= _MOST_INFO:
                found[name] = json.loads(body.text, parse_constant=str)
        except (ExchangeError, ValueError, RecursionError):
            continue
    return found


def completed(run: ServeRun) -> list[Answer]:
    """The answers that are none of the failures."""
    return [a for a in run.measured.answers if a.failure is None]
