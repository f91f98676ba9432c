"""Completions: a request becomes a job, chunks become the wire's chunks, results an answer.

Pure functions and values, as in chat.py. A choice's index counts the samples of the first prompt, then
those of the second, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.api.server.accounting import figures_of, usage_of
from paceline.api.server.envelope import Envelope
from paceline.api.server.errors import bad
from paceline.api.server.head import Head, check_result, head_of
from paceline.api.server.job import Job
from paceline.api.server.logprobs import (
    Offsets,
    TokenNames,
    check_prompt_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from paceline.api.server.prompt_list import prompts_of
from paceline.api.server.prompt_only import chunk_without_answer, without_answer
from paceline.api.server.protocol_refused import check_fields
from paceline.api.server.sampling import check_stream, params_of, scope_of, token_limit, truncated
from paceline.api.server.sources import check_trees, page_fields, sources_of
from paceline.api.server.structured import constraint_of
from paceline.core.errors import quoted

if TYPE_CHECKING:
    from paceline.api.results import Chunk, Result
    from paceline.api.server.context import Context
    from paceline.api.server.protocol_completions import CompletionRequest

KIND = "text_completion"
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """A completion request that was read: the engine's job, and what its answers are made of.

    `echoes`: text of each prompt, which its answers begin with; None: they do not.
    """

    body: CompletionRequest
    context: Context
    job: Job
    head: Head
    echoes: Sequence[str] | None

    def stream(self) -> CompletionStream:
        """What turns the job's chunks into the wire's."""
        return CompletionStream(self)

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

    def index(self, answer: Chunk | Result) -> int:
        """Which of the choices an answer is."""
        return answer.prompt_index * self.job.params.n + answer.sample_index

    def echo(self, answer: Chunk | Result) -> str:
        """What an answer begins with."""
        return self.echoes[answer.prompt_index] if self.echoes is not None else ""

    def offsets(self, answer: Chunk | Result) -> Offsets:
        """Where the tokens of an answer begin."""
        return Offsets(len(self.echo(answer)), self._hidden)

    def echo_logprobs(self, answer: Chunk | Result) -> dict[str, Any] | None:
        """Log-probabilities of the prompt that an answer begins with; None: they are not asked for."""
        most = self.body.logprobs
        if answer.prompt_logprobs is None or most is None or not self.body.echo:
            return None
        first = self.job.prompts[answer.prompt_index][0]
        # More may be known, for `prompt_logprobs`.
        told = [
            replace(token, top=token.top[:most])
            for token in answer.prompt_logprobs
            if token is not None
        ]
        return completion_logprobs(told, self.names, Offsets(0, self._hidden), first=first)

    @property
    def _hidden(self) -> frozenset[int]:
        """Tokens that the text leaves out."""
        hides = self.job.params.skip_special_tokens
        return self.context.tokenizer.special_ids if hides else frozenset[int]()


def read(body: CompletionRequest, context: Context, *, tenant: str = "") -> CompletionCall:
    """Understand a completion request.

    Args:
        body: the request.
        context: what is served.
        tenant: see `sampling.scope_of`.

    Raises:
        ApiError: 400 or 404; the request cannot be served.
    """
    check_fields(body, strict=context.strict)
    context.check_model(body.model)
    check_stream(body)
    check_prompt_logprobs(body)
    _refuse(body)
    special = body.add_special_tokens is not False
    given = prompts_of(body.prompt, context, add_special_tokens=special)
    room = body.max_tokens or 1
    prompts = [truncated(ids, room, body, context) for ids in given]
    most = None if body.max_tokens is None else room
    limit = token_limit(most, DEFAULT_MAX_TOKENS, prompts, context)
    params = params_of(body, context, max_tokens=limit, logprobs=body.logprobs)
    echoes = None
    if body.echo:
        hides = params.skip_special_tokens
        echoes = [context.tokenizer.decode(ids, skip_special_tokens=hides) for ids in prompts]
        if isinstance(body.prompt, str) and len(prompts[0]) == len(given[0]):
            echoes = [body.prompt]  # what was sent, whatever a tokenizer makes of it
    return CompletionCall(
        body=body,
        context=context,
        job=Job(
            prompts=prompts,
            params=params,
            constraint=constraint_of(body, context.compiler),
            scope=scope_of(body, tenant),
            shows_trees=check_trees(body),
            prompt_logprobs=_most_of_prompt(body),
        ),
        head=head_of(body, context, "cmpl-"),
        echoes=echoes,
    )


def _most_of_prompt(body: CompletionRequest) -> int | None:
    """Alternatives of each of the prompt's tokens; None: these are not scored."""
    asked = (body.prompt_logprobs, body.logprobs if body.echo else None)
    return max((most for most in asked if most is not None), default=None)


def _refuse(body: CompletionRequest) -> None:
    if body.suffix:
        msg = "suffix: text is continued, not filled in; leave it out"
        raise bad(msg, "suffix")
    if body.max_tokens == 0 and not body.echo:
        msg = "max_tokens 0 leaves nothing to answer; ask for 1 or more, or for the prompt with `echo`"
        raise bad(msg, "max_tokens")
    if body.max_tokens == 0 and body.min_tokens:
        msg = (
            f"min_tokens {body.min_tokens} is above max_tokens 0; at most as many are possible; lower it, "
            "or raise max_tokens"
        )
        raise bad(msg, "min_tokens")
    if body.best_of is not None and body.best_of != (body.n or 1):
        msg = (
            f"best_of {quoted(body.best_of)} differs from n {body.n or 1}; every sample that is made "
            "is returned; leave best_of out, or make it n"
        )
        raise bad(msg, "best_of")


class CompletionStream:
    """Turns the chunks of one job into the wire's, in the order in which they come."""

    def __init__(self, call: CompletionCall) -> None:
        body = call.body
        self._call = call
        self._names = call.names
        self._offsets: dict[int, Offsets] = {}
        self._tells_more = bool(
            body.logprobs is not None
            or body.return_token_ids
            or body.wants_sources
            or body.wants_trees
        )
        self._tells_all = body.wants_running_usage  # also chunks that add no text
        self._envelope = Envelope(
            KIND, head=call.head, body=call.body, job=call.job, context=call.context
        )

    def take(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The wire's chunks for one chunk of the engine.

        Raises:
            ApiError: the engine ended the answer before its time.
        """
        call = self._call
        if call.body.max_tokens == 0:
            chunk = chunk_without_answer(chunk)
        result = chunk.result
        index = call.index(chunk)
        found: list[dict[str, Any]] = []
        self._envelope.saw(chunk)
        if result is not None:
            check_result(result)
        if index not in self._offsets:
            self._offsets[index] = call.offsets(chunk)
            found += self._first(chunk, index)
        choice: dict[str, Any] = {
            "index": index,
            "text": chunk.text,
            "logprobs": None,
            "finish_reason": None,
        }
        more = self._more(chunk, index) if self._tells_more else {}
        if result is not None:
            more |= {"finish_reason": result.finish_reason, "stop_reason": result.stop_reason}
        if more:
            choice |= more
        if chunk.text or more or self._tells_all:
            found.append(self._envelope.chunk(choice, last=result is not None))
        return found

    def _more(self, chunk: Chunk, index: int) -> dict[str, Any]:
        """What a request asked to be told beside text."""
        found: dict[str, Any] = {}
        if chunk.logprobs:
            offsets = self._offsets[index]
            found["logprobs"] = completion_logprobs(chunk.logprobs, self._names, offsets)
        if self._call.body.return_token_ids:
            found["token_ids"] = list(chunk.token_ids)
        return found | page_fields(chunk, self._call.body, self._call.context)

    def end(self) -> list[dict[str, Any]]:
        """What follows the last answer."""
        if not self._call.body.wants_usage:
            return []
        return [self._envelope.end(usage_of(self._envelope.results, self._call.context))]

    def _first(self, chunk: Chunk, index: int) -> list[dict[str, Any]]:
        """What comes before an answer: its prompt, as text or as ids."""
        call, echo = self._call, self._call.echo(chunk)
        ids, logprobs = call.body.return_token_ids, call.echo_logprobs(chunk)
        if not echo and not ids and logprobs is None:
            return []
        choice = {"index": index, "text": echo, "logprobs": logprobs, "finish_reason": None}
        if ids:
            choice["prompt_token_ids"] = list(call.job.prompts[chunk.prompt_index])
            choice["token_ids"] = []
        return [self._envelope.chunk(choice, last=False)]


def response(call: CompletionCall, results: Sequence[Result]) -> dict[str, Any]:
    """The whole answer to a completion request (`CompletionCall.response`)."""
    for result in results:
        check_result(result)
    ordered = sorted(results, key=call.index)
    if call.body.max_tokens == 0:
        ordered = [without_answer(result) for result in ordered]
    found = call.head.fields(KIND) | {
        "choices": [_choice(call, result) for result in ordered],
        "usage": usage_of(ordered, call.context),
    }
    return found | figures_of(ordered, call.context)


def _choice(call: CompletionCall, result: Result) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": call.index(result),
        "text": call.echo(result) + result.text,
        "logprobs": None,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
    }
    if result.logprobs is not None:
        told = completion_logprobs(result.logprobs, call.names, call.offsets(result))
        before = call.echo_logprobs(result)
        choice["logprobs"] = told if before is None else {k: before[k] + v for k, v in told.items()}
    most, scores = call.body.prompt_logprobs, result.prompt_logprobs
    if most is not None and scores is not None:
        choice["prompt_logprobs"] = prompt_logprobs(scores, most, call.names)
    if call.body.return_token_ids:
        choice["token_ids"] = list(result.token_ids)
        choice["prompt_token_ids"] = list(result.prompt_ids)
    if call.body.wants_sources:
        choice["paceline"] = sources_of(result.token_ids, result.sources, call.context)
    return choice
