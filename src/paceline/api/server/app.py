"""create_app: the whole HTTP interface over a service, as an ASGI app. No globals, no signal handlers.

    metrics = Metrics("my-model")
    app = create_app(Service(llm, settings, listener=metrics), metrics=metrics)

The app can be mounted elsewhere or run by any ASGI server; the LLM stays its owner's, who closes it. The
limits on headers belong to the connection (connection.py) and are the process's (life.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

import paceline
from paceline.api.grammar import ConstraintError, Constraints
from paceline.api.server import (
    page,
    reference,
    routes_openai,
    routes_responses,
    routes_state,
)
from paceline.api.server.context import Context, context_of
from paceline.api.server.disconnect import ClientGoneError
from paceline.api.server.errors import ApiError, api_error, shown, validation_error
from paceline.api.server.keys import KeyGuard, Keys
from paceline.api.server.limits import BodyLimits
from paceline.api.server.metrics import Metrics
from paceline.api.server.service import Service
from paceline.api.server.settings import ServerSettings
from paceline.api.server.sse import JsonAnswer
from paceline.api.server.tools import planner_of
from paceline.core.errors import ConfigError, PacelineError

log = logging.getLogger(__name__)

_CLIENT_GONE = 499  # nobody reads it


def create_app(service: Service, *, metrics: Metrics) -> FastAPI:
    """The app.

    Args:
        service: answers, under its settings.
        metrics: what /metrics shows; usually the service's listener.

    Raises:
        ConfigError: the file of API keys cannot be read, or a parser's name is unknown.
    """
    settings = service.settings

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.stop_admitting()
        service.abort_all()

    app = reference.Described(
        title="Paceline",
        version=paceline.__version__,
        summary="Lossless speculative decoding behind OpenAI's interface",
        docs_url=None,
        openapi_url=None if settings.disable_fastapi_docs else "/openapi.json",
        redoc_url=None,
        lifespan=lifespan,
        middleware=_middleware(settings),
        exception_handlers=_handlers(),
    )
    context = _context(service)
    planner = planner_of(
        service.llm.tokenizer,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
    )
    # A request is compared with one path after the other: those that are asked for most come first.
    app.include_router(routes_openai.router(service, context, planner=planner))
    app.include_router(routes_responses.router(service, context, planner=planner))
    app.include_router(routes_state.router(service, metrics))
    if not settings.disable_page:
        app.include_router(page.router())
    if not settings.disable_fastapi_docs:
        has_keys = bool(settings.api_key or settings.api_key_file)
        app.include_router(reference.router(app.openapi, has_keys=has_keys))
    return app


def _context(service: Service) -> Context:
    llm = service.llm
    try:
        compiler = Constraints(
            llm.tokenizer,
            llm.model_config.vocab_size,
            llm.eos_token_ids,
            whitespace="compact" if service.settings.disable_any_whitespace else "flexible",
        )
    except (ConfigError, ConstraintError) as error:
        log.warning("requests for structured output will be refused: %s", error)
        compiler = None
    return context_of(
        llm,
        service.settings,
        created=int(time.time()),
        version=paceline.__version__,
        compiler=compiler,
    )


def _middleware(settings: ServerSettings) -> list[Middleware]:
    """From the outside in: a refusal by a later one passes the earlier ones."""
    found = []
    if settings.allowed_origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=settings.allowed_methods,
                allow_headers=settings.allowed_headers,
                allow_credentials=settings.allow_credentials,
            )
        )
    by_key = settings.cache_scope == "key"
    found += [
        Middleware(KeyGuard, keys=Keys.of(settings), by_key=by_key),
        Middleware(
            BodyLimits,
            max_bytes=settings.max_body_bytes,
            max_depth=settings.max_json_depth,
            seconds=settings.body_timeout,
        ),
    ]
    return found


def _answered(error: ApiError) -> Response:
    return JsonAnswer(error.body, error.status, error.headers)


def _handlers() -> dict[int | type[Exception], Callable[..., Any]]:
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return _answered(validation_error(error.errors()))

    async def refused(request: Request, error: HTTPException) -> Response:
        told = ApiError(error.status_code, str(error.detail))
        if error.status_code in {404, 405}:
            place = shown(f"{request.method} {request.url.path}")
            msg = f"there is nothing at {place}; /openapi.json lists the paths and methods; use one"
            told = ApiError(error.status_code, msg)
        return JsonAnswer(told.body, told.status, error.headers)

    async def known(_: Request, error: Exception) -> Response:
        return _answered(api_error(error))

    async def unknown(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _answered(api_error(error))

    async def left(_: Request, __: ClientGoneError) -> Response:
        return Response(status_code=_CLIENT_GONE)

    return {
        RequestValidationError: invalid,
        HTTPException: refused,
        ApiError: known,
        PacelineError: known,
        ClientGoneError: left,
        Exception: unknown,
    }
