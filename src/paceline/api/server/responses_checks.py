"""Refuses what responses elsewhere can do and these cannot: nothing that is asked is silently ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.api.server.errors import bad
from paceline.core.errors import quoted

if TYPE_CHECKING:
    from paceline.api.server.protocol_responses import ResponsesRequest

LOGPROBS = "message.output_text.logprobs"  # the one thing that `include` may ask for
_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512


def check_refused(body: ResponsesRequest) -> None:
    """Refuse what responses elsewhere can and these cannot.

    Raises:
        ApiError: 400, naming the field.
    """
    refused: Mapping[str, tuple[bool, str]] = {
        "background": (bool(body.background), "answers are made while their client waits"),
        "conversation": (body.conversation is not None, "use previous_response_id or `input`"),
        "prompt": (body.prompt is not None, "no prompts are stored; write it into `input`"),
        "context_management": (bool(body.context_management), "nothing is compacted here"),
        "truncation": (
            body.truncation not in {None, "disabled"},
            'what does not fit is refused ("disabled")',
        ),
        "n": (body.n not in {None, 1}, "there is one answer; ask several times"),
        "max_tokens": (body.max_tokens is not None, "its name here is max_output_tokens"),
        "return_token_ids": (bool(body.return_token_ids), "completions and chat tell them"),
        "paceline": (body.wants_sources or body.wants_trees, "chat tells where tokens came from"),
        "request_id": (body.request_id is not None, "a response's id is the server's own"),
        "response_format": (body.response_format is not None, "its name here is text.format"),
        "stream_options": (
            _wants_options(body),
            "the last event has the usage in any case, and nothing is obfuscated",
        ),
        "text.verbosity": (
            bool(body.text) and body.text.verbosity not in {None, "medium"},  # type: ignore[union-attr]
            "it cannot be honoured here",
        ),
        "reasoning.summary": (_wants_summary(body), "reasoning is told as it is, in `content`"),
    }
    for name, (is_asked, why) in refused.items():
        if is_asked:
            msg = f"{name}: {why}; leave it out"
            raise bad(msg, name)
    for name in body.include or ():
        if name != LOGPROBS:
            msg = (
                f"include: {quoted(name)} is not served; {LOGPROBS} is; reasoning comes as it is in "
                "its item's `content` and may be sent back so; leave it out"
            )
            raise bad(msg, "include")
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        msg = f'top_logprobs needs `include: ["{LOGPROBS}"]`; add it, or leave top_logprobs out'
        raise bad(msg, "top_logprobs")
    _check_metadata(body.metadata)


def _wants_options(body: ResponsesRequest) -> bool:
    asked = body.stream_options
    return asked is not None and any(
        (asked.include_usage, asked.continuous_usage_stats, asked.include_obfuscation)
    )


def _wants_summary(body: ResponsesRequest) -> bool:
    asked = body.reasoning
    return asked is not None and any(
        value not in {None, "auto"} for value in (asked.summary, asked.generate_summary)
    )


def _check_metadata(metadata: Mapping[str, Any] | None) -> None:
    given = metadata or {}
    if len(given) > _MAX_METADATA or any(
        len(key) > _MAX_KEY or not isinstance(value, str) or len(value) > _MAX_VALUE
        for key, value in given.items()
    ):
        msg = (
            f"metadata: at most {_MAX_METADATA} texts of {_MAX_VALUE} characters under keys of "
            f"{_MAX_KEY} are possible; shorten it"
        )
        raise bad(msg, "metadata")
