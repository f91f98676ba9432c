"""Head: what every answer and every piece of one begins with; and answers that did not come about."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.api.server.errors import ApiError, shown
from paceline.core.request import Fault

if TYPE_CHECKING:
    from paceline.api.results import Result
    from paceline.api.server.context import Context
    from paceline.api.server.protocol_sampling import SamplingFields


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Facts of one answer that its chunks repeat."""

    id: str
    created: int
    model: str
    fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        """The first fields of an object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def head_of(body: SamplingFields, context: Context, prefix: str) -> Head:
    """The head of an answer, its id made of the request's own where it has one.

    Args:
        body: the request.
        context: what is served.
        prefix: "chatcmpl-" or "cmpl-".
    """
    return Head(
        id=prefix + (body.request_id or secrets.token_hex(16)),
        created=int(time.time()),
        model=body.model or context.model,
        fingerprint=context.fingerprint,
    )


def check_result(result: Result) -> None:
    """Refuse to show an answer that the engine ended before its time.

    Raises:
        ApiError: 400 where what was asked for cannot go on, 500 where it failed, 503 where the server
            ended it.
    """
    if result.finish_reason == "error":
        msg = f"the answer failed after {len(result.token_ids)} tokens: {shown(str(result.error), 900)}"
        raise ApiError(400 if result.fault is Fault.REQUEST else 500, msg)
    if result.finish_reason == "abort":
        msg = (
            f"the server ended this answer after {len(result.token_ids)} tokens, as it is shutting "
            "down; ask again, or another replica"
        )
        raise ApiError(503, msg, retry_after_s=1.0)
