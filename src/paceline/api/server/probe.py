"""/health_generate: whether the engine makes tokens, found out by letting it make one.

It takes a place in the queue and a row like any other request, so it says what one would meet.
Not for: whether the engine's loop is alive (service.py), which asks nothing of it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from paceline.api.server.errors import ApiError
from paceline.api.server.head import check_result
from paceline.api.server.job import Job
from paceline.core.request import SamplingParams

if TYPE_CHECKING:
    from paceline.api.server.service import Service

_SCOPE = (
    "probe"  # no request's, as those are empty or JSON: what is probed leaves no traces for them
)


async def make_token(service: Service) -> None:
    """Return once the engine has made a token.

    Raises:
        ApiError: 503; it was not made in time, or the server ends. 500; it failed.
        PacelineError: there is no room in the queue, the server ends, or the engine has stopped.
    """
    seconds, before = service.settings.health_generate_timeout, service.load()
    try:
        async with asyncio.timeout(seconds):
            await _make(service)
    except TimeoutError as error:
        msg = (
            f"the engine made no token within {seconds:g} s, beside {before['num_requests_running']} "
            f"answers in the making and {before['num_requests_waiting']} that waited; ask again, or give "
            "it more time with --health-generate-timeout"
        )
        raise ApiError(503, msg, retry_after_s=1.0) from error


async def _make(service: Service) -> None:
    first = service.llm.tokenizer.bos_token_id
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, num_speculative_tokens=0)
    job = Job(prompts=[[0 if first is None else first]], params=params, scope=_SCOPE)
    async with service.run(job) as stream:
        async for chunk in stream:
            if chunk.result is not None:
                check_result(chunk.result)
