"""What the server says of itself: probes, figures, version. Only the probe that costs a token needs a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

import paceline
from paceline.api.server.disconnect import until_gone
from paceline.api.server.engine_metrics import accept_length, accepted_per_position
from paceline.api.server.errors import ApiError, shown
from paceline.api.server.metrics import CONTENT_TYPE, Metrics
from paceline.api.server.probe import make_token
from paceline.api.server.protocol_answers import ErrorAnswer
from paceline.api.server.service import Service
from paceline.api.server.settings_values import public
from paceline.api.server.sse import JsonAnswer


def router(service: Service, metrics: Metrics) -> APIRouter:
    """Routes over a service.

    Args:
        service: whose state is told.
        metrics: what /metrics shows.
    """
    routes = APIRouter(tags=["State"])

    def health() -> Response:
        """200 while the engine works or has nothing to do; 503 once it has stopped or hangs."""
        return _probe(service.unhealthy)

    def ready() -> Response:
        """200 while requests are welcome; 503 from the moment the server shuts down, too."""
        return _probe(service.unready)

    red: dict[int | str, dict[str, Any]] = {503: {"model": ErrorAnswer, "description": "Why not."}}
    for path in ("/health", "/ping"):
        routes.get(path, response_class=Response, responses=red)(health)
        routes.head(path, include_in_schema=False)(health)
    routes.post("/ping", include_in_schema=False)(health)  # SageMaker's
    routes.get("/ready", response_class=Response, responses=red)(ready)
    routes.head("/ready", include_in_schema=False)(ready)

    @routes.get(
        "/health_generate",
        response_class=Response,
        responses={status: {"model": ErrorAnswer} for status in (401, 500, 503)},
    )
    async def health_generate(request: Request) -> Response:
        """200 once the engine has made a token for this; 503 where it does not in time."""
        await until_gone(request.receive, make_token(service))
        return Response(status_code=200)

    @routes.get("/version")
    def version() -> Response:
        """The package's version."""
        return JsonAnswer({"version": paceline.__version__})

    @routes.get("/load")
    def load() -> Response:
        """Answers in the making, answers that wait, and the prompt tokens of those."""
        return JsonAnswer(service.load())

    @routes.get("/server_info")
    async def server_info() -> Response:
        """What is served, how it speculates, and how well."""
        return JsonAnswer(_info(service, await service.report()))

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics_text() -> Response:
        """Prometheus's text format."""
        return Response(
            metrics.render(await service.report()), headers={"Content-Type": CONTENT_TYPE}
        )

    return routes


def _probe(problem: str | None) -> Response:
    if problem is None:
        return Response(status_code=200)
    return JsonAnswer(ApiError(503, problem).body, 503)


def _info(service: Service, report: Mapping[str, float]) -> dict[str, Any]:
    llm = service.llm
    config = asdict(llm.config)
    config["model"] = _name(config["model"])
    draft = config.pop("draft")
    draft["model"] = None if draft["model"] is None else _name(draft["model"])
    return {
        "version": paceline.__version__,
        "model": config["model"],
        "served_model_name": list(service.settings.served_model_name),
        "max_model_len": llm.max_len,
        "model_config": asdict(llm.model_config),
        "engine_config": config,
        "speculative_config": draft,
        "drafter": asdict(llm.spec),
        "settings": public(service.settings),
        "notes": [shown(note) for note in llm.notes],
        "accept_length": accept_length(report),
        "accepted_per_position": list(accepted_per_position(report).values()),
        "counters": dict(report),
        "load": service.load(),
    }


def _name(model: str) -> str:
    """A model's name without the folders that it lies in."""
    return Path(model).name if Path(model).is_absolute() else model
