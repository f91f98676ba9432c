"""/v1/responses: make an answer, ask for it again, delete it, call it off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.api.server import responses, responses_page
from paceline.api.server.bodies import body_schema, parsed
from paceline.api.server.disconnect import until_gone
from paceline.api.server.errors import ApiError, api_error, bad, shown
from paceline.api.server.keys import owner_of, tenant_of
from paceline.api.server.plan import PLAIN, Planner
from paceline.api.server.protocol_responses import RESPONSES, ResponsesRequest
from paceline.api.server.response_store import ResponseStore, Stored
from paceline.api.server.responses_events import ResponseEvents
from paceline.api.server.sse import EventStream, JsonAnswer
from paceline.api.server.wire import Wire

if TYPE_CHECKING:
    from paceline.api.results import Chunk, Result
    from paceline.api.server.context import Context
    from paceline.api.server.responses import ResponseCall
    from paceline.api.server.responses_events import Event
    from paceline.api.server.responses_input import Item
    from paceline.api.server.service import Service, Stream

_EXAMPLE = {"input": "Name three colours.", "max_output_tokens": 30}


class Running:
    """A response in the making.

    Args:
        call: what was asked.
        stream: makes it.
        kept: called once, as soon as it is whole or nobody makes it any more.
    """

    def __init__(
        self, call: ResponseCall, stream: Stream, kept: Callable[[Running], object]
    ) -> None:
        self.call = call
        self.events = ResponseEvents(call)
        self.is_cancelled = False
        self.is_forgotten = False
        self._stream = stream
        self._kept = kept
        self._is_open = True

    def take(self, chunk: Chunk) -> list[Event]:
        """Events for one chunk; the response is kept before its last event is told."""
        found = self.events.take(chunk, is_cancelled=self.is_cancelled)
        if self.events.response is not None:
            self.close()
        return found

    def end(self) -> list[Event]:
        """None: the last chunk has ended the response."""
        return []

    def fail(self, error: Exception) -> list[Event]:
        """What went wrong, as the response's end."""
        found = self.events.fail(api_error(error))
        self.close()
        return found

    def close(self) -> None:
        """Nothing more comes of it."""
        if self._is_open:
            self._is_open = False
            self._kept(self)

    def cancel(self) -> dict[str, Any]:
        """Call the answer off; return the response as far as it came."""
        self.is_cancelled = True
        self._stream.abort()
        return responses.response_of(self.call, self.events.output, "cancelled")

    def forget(self) -> None:
        """Call the answer off; nothing of it is kept."""
        self.is_forgotten = True
        self.cancel()


class Responses:
    """What the paths share: the responses that are kept, and those in the making."""

    def __init__(self, service: Service, context: Context, planner: Planner) -> None:
        self.service = service
        self.store = ResponseStore(service.settings.max_stored_responses)
        self._context = context
        self._planner = planner
        self._running: dict[tuple[str, str], Running] = {}

    async def understood(self, request: Request) -> ResponseCall:
        """The request, with the conversation that it goes on with.

        Raises:
            ApiError: 400, or 404: there is no such earlier response, or it is still being made.
        """
        raw = await request.body()
        body = await asyncio.to_thread(parsed, raw, ResponsesRequest)
        earlier: tuple[Item, ...] = ()
        if body.previous_response_id is not None:
            if self.running(request, body.previous_response_id) is not None:
                msg = (
                    f"the response {shown(body.previous_response_id, 80)!r} is still being made; one that "
                    "has ended can be gone on with; wait for its end, or cancel it"
                )
                raise bad(msg, "previous_response_id")
            stored = self.found(request, body.previous_response_id, "previous_response_id")
            earlier = tuple(stored.items)
        read = partial(
            responses.read,
            body,
            self._context,
            planner=self._planner,
            tenant=tenant_of(request),
            earlier=earlier,
        )
        return await asyncio.to_thread(read)

    def found(self, request: Request, response_id: str, param: str = "response_id") -> Stored:
        """A response that is kept.

        Raises:
            ApiError: 404; there is none, or it was made with another key.
        """
        stored = self.store.get(owner_of(request), response_id)
        if stored is None:
            raise _missing(response_id, param)
        return stored

    def running(self, request: Request, response_id: str) -> Running | None:
        """A response in the making; None: there is none."""
        return self._running.get((owner_of(request), response_id))

    def began(self, owner: str, call: ResponseCall, stream: Stream) -> Running:
        """A response is being made, and may be called off from now on."""
        running = Running(call, stream, partial(self._ended, owner))
        self._running[owner, call.id] = running
        return running

    def forget(self, request: Request, response_id: str) -> None:
        """Forget a response, whether it is kept or in the making.

        Raises:
            ApiError: 404; there is none, or it was made with another key.
        """
        running = self._running.pop((owner_of(request), response_id), None)
        if running is not None:
            running.forget()
        elif not self.store.drop(owner_of(request), response_id):
            raise _missing(response_id, "response_id")

    def _ended(self, owner: str, running: Running) -> None:
        """Keep what came of a response."""
        self._running.pop((owner, running.call.id), None)
        response = running.events.response
        if response is not None and running.call.is_stored and not running.is_forgotten:
            self.store.put(owner, response, running.call.inputs)


def router(service: Service, context: Context, *, planner: Planner = PLAIN) -> APIRouter:
    """The paths over a service.

    Args:
        service: runs jobs.
        context: what is served.
        planner: knows the model's tools and reasoning.
    """
    found = APIRouter(tags=["Responses"])
    shared = Responses(service, context, planner)

    @found.post(
        "/v1/responses",
        responses=RESPONSES["create"],
        openapi_extra=body_schema(ResponsesRequest, _EXAMPLE),
        operation_id="create_response",
    )
    async def create(request: Request) -> Response:
        """Answer a turn of a conversation."""
        call = await shared.understood(request)
        owner = owner_of(request)
        if not call.body.streams:
            return JsonAnswer(await until_gone(request.receive, _whole(shared, owner, call)))
        stream = await until_gone(request.receive, service.run(call.job))
        settings, running = service.settings, shared.began(owner, call, stream)
        first = running.events.start()
        return EventStream(
            Wire(stream, running, first=first, failed=running.fail, left=running.close),
            end=None,
            keep_alive_s=settings.sse_keep_alive_interval,
            write_timeout_s=settings.write_timeout,
            error_event="error",
        )

    @found.get(
        "/v1/responses/{response_id}", responses=RESPONSES["get"], operation_id="get_response"
    )
    async def get(response_id: str, request: Request, stream: str | None = None) -> Response:
        """A response that was made before, or is being made."""
        if stream not in {None, "false"}:
            msg = "stream: a response that was made is told as a whole; leave it out"
            raise bad(msg, "stream")
        responses_page.refuse(request.query_params, "include", "starting_after")
        running = shared.running(request, response_id)
        if running is not None:
            output = running.events.output
            return JsonAnswer(responses.response_of(running.call, output, "in_progress"))
        return JsonAnswer(shared.found(request, response_id).response)

    @found.get(
        "/v1/responses/{response_id}/input_items",
        responses=RESPONSES["input_items"],
        operation_id="list_input_items",
    )
    async def input_items(
        response_id: str,
        request: Request,
        limit: responses_page.Limit | None = None,
        order: responses_page.Order | None = None,
        after: str | None = None,
        before: str | None = None,
    ) -> Response:
        """The conversation that a response answers, earliest first; all of it, or a page."""
        responses_page.refuse(request.query_params, "include")
        responses_page.check(limit, order)
        running = shared.running(request, response_id)
        inputs = (
            shared.found(request, response_id).inputs if running is None else running.call.inputs
        )
        data = [{"id": f"in_{i}_{response_id}", **item} for i, item in enumerate(inputs)]
        return JsonAnswer(
            responses_page.page(data, limit=limit, order=order, after=after, before=before)
        )

    @found.delete(
        "/v1/responses/{response_id}", responses=RESPONSES["delete"], operation_id="delete_response"
    )
    async def delete(response_id: str, request: Request) -> Response:
        """Forget a response; one that is being made is called off."""
        shared.forget(request, response_id)
        return JsonAnswer({"id": response_id, "object": "response", "deleted": True})

    @found.post(
        "/v1/responses/{response_id}/cancel",
        responses=RESPONSES["cancel"],
        operation_id="cancel_response",
    )
    async def cancel(response_id: str, request: Request) -> Response:
        """Call a response off that is being made."""
        running = shared.running(request, response_id)
        if running is not None:
            return JsonAnswer(running.cancel())
        status = shared.found(request, response_id).response["status"]
        msg = (
            f"the response has ended ({status}); one that is being made can be called off; get it as it "
            "is, or delete it"
        )
        raise bad(msg, "response_id")

    return found


async def _whole(shared: Responses, owner: str, call: ResponseCall) -> dict[str, Any]:
    async with shared.service.run(call.job) as stream:
        running = shared.began(owner, call, stream)
        try:
            result: Result | None = None
            async for chunk in stream:
                result = chunk.result or result
            assert result is not None, "every answer ends with a result"
            whole = partial(running.events.whole, result, is_cancelled=running.is_cancelled)
            return await asyncio.to_thread(whole)
        finally:
            running.close()


def _missing(response_id: str, param: str) -> ApiError:
    msg = (
        f"there is no response {shown(response_id, 80)!r}; those of this key that are still kept can "
        "be named; send the conversation in `input` instead"
    )
    return ApiError(404, msg, param=param)
