"""Chat completions: a request becomes a job, chunks become the wire's chunks, results an answer.

Pure functions and values: no HTTP, no engine, no clock but the one that stamps an answer.
Not for: tools and reasoning (plan.py has their seam), prompts of completions (completions.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.api.server.accounting import figures_of, usage_of
from paceline.api.server.conversation import prompt_of
from paceline.api.server.envelope import Envelope
from paceline.api.server.errors import api_error, bad
from paceline.api.server.head import Head, check_result, head_of
from paceline.api.server.job import Job
from paceline.api.server.logprobs import (
    TokenNames,
    chat_logprobs,
    check_prompt_logprobs,
    prompt_logprobs,
)
from paceline.api.server.pieces import Piece, chat_delta, chat_message, has_calls
from paceline.api.server.plan import PLAIN, Parser, Plan, Planner
from paceline.api.server.protocol_refused import check_fields
from paceline.api.server.sampling import check_stream, params_of, scope_of, token_limit, truncated
from paceline.api.server.sources import check_trees, page_fields, sources_of
from paceline.core.errors import RequestError

if TYPE_CHECKING:
    from paceline.api.results import Chunk, Result
    from paceline.api.server.context import Context
    from paceline.api.server.protocol_chat import ChatRequest

CHUNK, WHOLE = "chat.completion.chunk", "chat.completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A chat request that was read: the engine's job, and what its answers are made of."""

    body: ChatRequest
    context: Context
    plan: Plan
    prompt: str  # the rendered conversation
    job: Job
    head: Head

    def stream(self) -> ChatStream:
        """What turns the job's chunks into the wire's."""
        return ChatStream(self)

    def response(self, results: Sequence[Result]) -> dict[str, Any]:
        """The whole answer.

        Raises:
            ApiError: the engine ended an answer before its time.
        """
        return response(self, results)

    @property
    def names(self) -> TokenNames:
        """How tokens are called in log-probabilities."""
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return TokenNames(self.context.tokenizer, as_ids=as_ids)


def read(
    body: ChatRequest, context: Context, *, planner: Planner = PLAIN, tenant: str = ""
) -> ChatCall:
    """Understand a chat request.

    Args:
        body: the request.
        context: what is served.
        planner: knows the model's tools and reasoning.
        tenant: see `sampling.scope_of`.

    Raises:
        ApiError: 400 or 404; the request cannot be served.
    """
    check_fields(body, strict=context.strict)
    context.check_model(body.model)
    check_stream(body)
    check_prompt_logprobs(body)
    if body.echo:
        msg = "echo: a conversation is not repeated in its answer; leave it out, or use completions"
        raise bad(msg, "echo")
    plan = planner.plan(body, context.compiler)
    prompt = prompt_of(body, plan, context.tokenizer)
    try:
        # The template writes the beginning of a text where the model wants one.
        ids = context.tokenizer.encode(prompt, add_special_tokens=bool(body.add_special_tokens))
    except RequestError as error:
        raise api_error(error, param="messages") from error
    most = _most_tokens(body)
    prompts = [truncated(ids, most or 1, body, context)]
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    limit = token_limit(most, None, prompts, context, field=field)
    params = params_of(body, context, max_tokens=limit, logprobs=_logprobs(body))
    if plan.shows_special:
        params = replace(params, skip_special_tokens=False)
    scope = scope_of(body, tenant)
    return ChatCall(
        body=body,
        context=context,
        plan=plan,
        prompt=prompt,
        job=Job(
            prompts=prompts,
            params=params,
            constraint=plan.constraint,
            scope=scope,
            shows_trees=check_trees(body),
            prompt_logprobs=body.prompt_logprobs,
        ),
        head=head_of(body, context, "chatcmpl-"),
    )


def _most_tokens(body: ChatRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        msg = (
            f"max_tokens {old} and max_completion_tokens {new} are one thing; they may not differ; "
            "give max_completion_tokens alone"
        )
        raise bad(msg, "max_completion_tokens")
    return old if new is None else new


def _logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        msg = "top_logprobs needs `logprobs: true`; set it, or leave top_logprobs out"
        raise bad(msg, "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


class ChatStream:
    """Turns the chunks of one job into the wire's, in the order in which they come.

    Per answer: a chunk with the role, chunks with what was added, the last of them with the reason for
    the end; after all answers, where asked for, one with the usage.
    """

    def __init__(self, call: ChatCall) -> None:
        body = call.body
        self._call = call
        self._names = call.names
        self._tells_more = bool(
            body.logprobs or body.return_token_ids or body.wants_sources or body.wants_trees
        )
        self._tells_all = body.wants_running_usage  # also chunks that add no text
        self._parsers: dict[int, Parser] = {}
        self._has_calls: set[int] = set()
        self._envelope = Envelope(
            CHUNK, head=call.head, body=call.body, job=call.job, context=call.context
        )

    def take(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The wire's chunks for one chunk of the engine.

        Raises:
            ApiError: the engine ended the answer before its time.
        """
        index, found = chunk.sample_index, []
        self._envelope.saw(chunk)
        if index not in self._parsers:
            self._parsers[index] = self._call.plan.parser(self._call.prompt)
            found.append(self._first(index))
        parser = self._parsers[index]
        pieces = parser.feed(chunk.text)
        if chunk.result is not None:
            check_result(chunk.result)
            pieces += parser.finish()
        return [*found, *self._added(chunk, pieces)]

    def end(self) -> list[dict[str, Any]]:
        """What follows the last answer."""
        if not self._call.body.wants_usage:
            return []
        return [self._envelope.end(_usage(self._call, self._envelope.results))]

    def _added(self, chunk: Chunk, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        result = chunk.result
        if has_calls(pieces):
            self._has_calls.add(chunk.sample_index)
        delta = chat_delta(pieces)
        choice: dict[str, Any] = {
            "index": chunk.sample_index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        }
        more = self._more(chunk) if self._tells_more else {}
        if result is not None:
            more |= _reason(result, has_calls=chunk.sample_index in self._has_calls)
        if not (delta or more or self._tells_all):
            return []  # the text of these tokens is not certain yet
        if more:
            choice |= more
        return [self._envelope.chunk(choice, last=result is not None)]

    def _more(self, chunk: Chunk) -> dict[str, Any]:
        """What a request asked to be told beside text."""
        found: dict[str, Any] = {}
        if chunk.logprobs:
            found["logprobs"] = chat_logprobs(chunk.logprobs, self._names)
        if self._call.body.return_token_ids:
            found["token_ids"] = list(chunk.token_ids)
        return found | page_fields(chunk, self._call.body, self._call.context)

    def _first(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        found = self._envelope.chunk(choice, last=False)
        if self._call.body.return_token_ids:
            found["prompt_token_ids"] = list(self._call.job.prompts[0])
        return found


def response(call: ChatCall, results: Sequence[Result]) -> dict[str, Any]:
    """The whole answer to a chat request (`ChatCall.response`)."""
    for result in results:
        check_result(result)
    ordered = sorted(results, key=lambda result: result.sample_index)
    found = call.head.fields(WHOLE) | {
        "choices": [_choice(call, result) for result in ordered],
        "usage": _usage(call, ordered),
    }
    if call.body.return_token_ids:
        found["prompt_token_ids"] = list(call.job.prompts[0])
    most, scores = call.body.prompt_logprobs, ordered[0].prompt_logprobs
    if most is not None and scores is not None:
        found["prompt_logprobs"] = prompt_logprobs(scores, most, call.names)
    return found | figures_of(ordered, call.context)


def _choice(call: ChatCall, result: Result) -> dict[str, Any]:
    parser = call.plan.parser(call.prompt)
    pieces = [*parser.feed(result.text), *parser.finish()]
    choice: dict[str, Any] = {
        "index": result.sample_index,
        "message": chat_message(pieces),
        "logprobs": None,
        **_reason(result, has_calls=has_calls(pieces)),
    }
    if result.logprobs is not None:
        choice["logprobs"] = chat_logprobs(result.logprobs, call.names)
    if call.body.return_token_ids:
        choice["token_ids"] = list(result.token_ids)
    if call.body.wants_sources:
        choice["paceline"] = sources_of(result.token_ids, result.sources, call.context)
    return choice


def _reason(result: Result, *, has_calls: bool) -> dict[str, Any]:
    reason = result.finish_reason
    if has_calls and reason == "stop":
        reason = "tool_calls"
    return {"finish_reason": reason, "stop_reason": result.stop_reason}


def _usage(call: ChatCall, results: Sequence[Result]) -> dict[str, Any]:
    counts = [call.plan.reasoning_tokens(call.prompt, result.token_ids) for result in results]
    known = [count for count in counts if count is not None]
    return usage_of(results, call.context, reasoning_tokens=sum(known) if known else None)
