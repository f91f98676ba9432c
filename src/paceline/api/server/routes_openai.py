"""OpenAI's paths and the tokenizer's: bodies in, answers or event streams out; all meaning is elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.api.server import chat, completions, tokens
from paceline.api.server.bodies import body_schema, understood
from paceline.api.server.disconnect import until_gone
from paceline.api.server.keys import tenant_of
from paceline.api.server.plan import PLAIN, Planner
from paceline.api.server.protocol_answers import RESPONSES
from paceline.api.server.protocol_chat import ChatRequest
from paceline.api.server.protocol_completions import CompletionRequest
from paceline.api.server.protocol_tokens import DetokenizeRequest, TokenizeRequest
from paceline.api.server.sse import EventStream, JsonAnswer
from paceline.api.server.wire import Wire

if TYPE_CHECKING:
    from paceline.api.results import Result
    from paceline.api.server.context import Context
    from paceline.api.server.job import Job
    from paceline.api.server.service import Service
    from paceline.api.server.wire import Events

_CHAT = {"messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 30}


class Call(Protocol):
    """A request that was read."""

    @property
    def job(self) -> Job:
        """What it asks of the engine."""
        ...

    def stream(self) -> Events[dict[str, Any]]:
        """Its answer, bit by bit."""
        ...

    def response(self, results: Sequence[Result]) -> dict[str, Any]:
        """Its answer as a whole."""
        ...


def router(service: Service, context: Context, *, planner: Planner = PLAIN) -> APIRouter:
    """The paths over a service.

    Args:
        service: runs jobs.
        context: what is served.
        planner: knows the model's tools and reasoning.
    """
    found = APIRouter(tags=["OpenAI"])

    @found.post(
        "/v1/chat/completions",
        responses=RESPONSES["chat"],
        openapi_extra=body_schema(ChatRequest, _CHAT),
        operation_id="chat_completions",
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        read = partial(chat.read, context=context, planner=planner, tenant=tenant_of(request))
        call = await understood(request, ChatRequest, read)
        return await answered(service, call, request, streams=call.body.streams)

    @found.post(
        "/v1/chat/completions/render",
        responses=RESPONSES["render"],
        openapi_extra=body_schema(ChatRequest, _CHAT),
        operation_id="render_chat",
    )
    async def render_chat(request: Request) -> Response:
        """Prompt and token ids that a chat request would give; nothing is generated."""

        def read(body: ChatRequest) -> dict[str, Any]:
            return tokens.rendered(chat.read(body, context, planner=planner))

        return JsonAnswer(await understood(request, ChatRequest, read))

    @found.post(
        "/v1/completions",
        responses=RESPONSES["completions"],
        openapi_extra=body_schema(
            CompletionRequest, {"prompt": "Once upon a time", "max_tokens": 30}
        ),
        operation_id="completions",
    )
    async def text_completions(request: Request) -> Response:
        """Continue prompts."""
        read = partial(completions.read, context=context, tenant=tenant_of(request))
        call = await understood(request, CompletionRequest, read)
        return await answered(service, call, request, streams=call.body.streams)

    _add_small(found, context, planner)
    return found


def _add_small(found: APIRouter, context: Context, planner: Planner) -> None:
    """Paths that need no engine."""

    @found.post(
        "/tokenize",
        responses=RESPONSES["tokenize"],
        openapi_extra=body_schema(TokenizeRequest, {"prompt": "Once upon a time"}),
        operation_id="tokenize",
    )
    async def tokenize(request: Request) -> Response:
        """Tokens of a text or of a conversation."""
        read = partial(tokens.tokenize, context=context, planner=planner)
        return JsonAnswer(await understood(request, TokenizeRequest, read))

    @found.post(
        "/detokenize",
        responses=RESPONSES["detokenize"],
        openapi_extra=body_schema(DetokenizeRequest, {"tokens": [1, 2, 3]}),
        operation_id="detokenize",
    )
    async def detokenize(request: Request) -> Response:
        """Text of tokens."""
        read = partial(tokens.detokenize, context=context)
        return JsonAnswer(await understood(request, DetokenizeRequest, read))

    @found.get("/v1/models", responses=RESPONSES["models"], operation_id="list_models")
    async def list_models() -> Response:
        """What is served."""
        return JsonAnswer(tokens.model_list(context))

    # Names of models may hold slashes.
    @found.get("/v1/models/{name:path}", responses=RESPONSES["model"], operation_id="get_model")
    async def get_model(name: str) -> Response:
        """One name under which something is served."""
        return JsonAnswer(tokens.model_card(name, context))


async def answered(service: Service, call: Call, request: Request, *, streams: bool) -> Response:
    """Run a call's job and answer with it.

    Raises:
        ApiError, PacelineError: it was not admitted, or the engine refuses it or failed.
        ClientGoneError: nobody waits for the answer.
    """
    if not streams:
        return JsonAnswer(await until_gone(request.receive, _whole(service, call)))
    # What stands against the job is told with its own status, so before the stream begins.
    stream = await until_gone(request.receive, service.run(call.job))
    settings = service.settings
    return EventStream(
        Wire(stream, call.stream()),
        keep_alive_s=settings.sse_keep_alive_interval,
        write_timeout_s=settings.write_timeout,
    )


async def _whole(service: Service, call: Call) -> dict[str, Any]:
    async with service.run(call.job) as stream:
        results = [chunk.result async for chunk in stream if chunk.result is not None]
    # Long answers with log-probabilities take a while to be put together.
    return await asyncio.to_thread(call.response, results)
