"""What tests of the server's OpenAI side share: a context over the tiny tokenizer, and jobs that are run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paceline.api.llm import LLM
from paceline.api.results import Chunk, Result
from paceline.api.server import chat, completions
from paceline.api.server.context import Context, context_of
from paceline.api.server.errors import ApiError
from paceline.api.server.job import Job
from paceline.api.server.protocol_chat import ChatRequest
from paceline.api.server.protocol_completions import CompletionRequest
from paceline.api.server.settings import ServerSettings
from paceline.api.tokenizer import Tokenizer
from paceline.api.tokenizer_files import TokenizerParts
from paceline.core.request import Request
from tests import tiny
from tests.fake_engine import EOS, FakeEngine

TOKENIZER = Tokenizer(
    TokenizerParts(
        backend=tiny.tiny_tokenizer(),
        named_tokens={"eos_token": "<|im_end|>"},
        eos_token_ids=(EOS,),
        chat_templates={"default": tiny.CHAT_TEMPLATE},
    )
)
Script = Sequence[int] | Callable[[Request, int], Sequence[int]]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def text_of(token_ids: Sequence[int]) -> str:
    return TOKENIZER.decode(token_ids)


@contextmanager
def served(script: Script = (5, EOS), **options: Any) -> Iterator[tuple[LLM, Context]]:
    """An LLM over a fake engine, and its context."""
    compiler = options.pop("compiler", None)
    changes = {k: options.pop(k) for k in ("strict", "enable_draft_usage") if k in options}
    settings = ServerSettings(served_model_name=("tiny",), **changes)
    llm = LLM.from_engine(FakeEngine(script, **options), TOKENIZER)
    try:
        yield llm, context_of(llm, settings, created=7, version="1.2", compiler=compiler)
    finally:
        llm.close()


def context(**options: Any) -> Context:
    with served(**options) as (_, found):
        return found


def run(llm: LLM, job: Job) -> list[Chunk]:
    """All chunks of a job; those of a single prompt come as the engine's steps made them."""
    if len(job.prompts) == 1 and job.constraint is None and job.prompt_logprobs is None:
        return list(llm.iter_chunks(job.prompts[0], job.params))

    async def collect() -> list[Chunk]:
        answers = await llm.submit(
            job.prompts,
            job.params,
            constraint=job.constraint,
            scope=job.scope,
            prompt_logprobs=job.prompt_logprobs,
        )
        return [chunk async for chunk in answers]

    return asyncio.run(collect())


def flat(lists: Iterable[Sequence[Any]]) -> list[Any]:
    return [item for one in lists for item in one]


def results(chunks: Sequence[Chunk]) -> list[Result]:
    return [chunk.result for chunk in chunks if chunk.result is not None]


def chat_call(found: Context, **body: Any) -> chat.ChatCall:
    given = {"messages": [{"role": "user", "content": "hi"}], **body}
    return chat.read(ChatRequest.model_validate(given), found)


def completion_call(found: Context, **body: Any) -> completions.CompletionCall:
    given = {"prompt": "the", **body}
    return completions.read(CompletionRequest.model_validate(given), found)


def streamed(llm: LLM, call: chat.ChatCall | completions.CompletionCall) -> list[dict[str, Any]]:
    """Every chunk that goes over the wire."""
    stream = call.stream()
    events = [event for chunk in run(llm, call.job) for event in stream.take(chunk)]
    return [*events, *stream.end()]


def answered(llm: LLM, call: chat.ChatCall | completions.CompletionCall) -> dict[str, Any]:
    """The whole answer."""
    return call.response(results(run(llm, call.job)))


def refusal(function: Callable[..., object], *args: Any, **kwargs: Any) -> ApiError:
    """The error that a call ends with."""
    try:
        function(*args, **kwargs)
    except ApiError as error:
        return error
    msg = "nothing was refused"
    raise AssertionError(msg)
