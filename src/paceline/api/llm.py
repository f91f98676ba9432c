"""LLM: text in, text out, over an engine in a background thread. The public Python interface.

    with LLM(spec="suffix") as llm:
        for result in llm.generate(["One", "Two"], SamplingParams(max_tokens=32)):
            print(result.text, result.accept_length)

Any number of threads and coroutines may use one LLM at the same time; their requests are decoded
together. Not for: a server's protocol, or a prompt's tokens (tokenizer.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

from paceline.api.completion import Completion
from paceline.api.loop import EngineLoop, Steppable
from paceline.api.options import engine_config
from paceline.api.results import Chunk, Result
from paceline.core.errors import EngineStoppedError, PacelineError, RequestError
from paceline.core.request import Request, SamplingParams, StepOutput

if TYPE_CHECKING:
    from paceline.api.chat_template import Message
    from paceline.api.tokenizer import Tokenizer
    from paceline.core.config import EngineConfig, ModelConfig
    from paceline.draft.base import DrafterSpec

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None
_Item = Chunk | PacelineError


class ServedEngine(Steppable, Protocol):
    """The part of `Engine` that an LLM uses beside what its loop drives."""

    config: EngineConfig
    model_config: ModelConfig
    spec: DrafterSpec
    notes: tuple[str, ...]
    max_len: int

    def draw_seed(self) -> int:
        """A fresh seed."""
        ...

    def report(self) -> dict[str, float]:
        """Counters since the start."""
        ...


class LLM:
    """A model that answers.

    Args:
        model: folder, GGUF file, hub id, or "default".
        config: start from this config instead of the defaults.
        **options: flat names of config fields: max_len, max_rows, memory_gb, dtype, weights, ...;
            `spec` is the drafter ("none", "ngram", "suffix", "suffix:path"), `spec_nodes` its most
            draft nodes per step, `speculative_config` a mapping with vLLM's keys.

    Raises:
        ConfigError: an unknown option, or a value that cannot be served.
        ModelError: the model's files are missing, damaged or not supported.
    """

    def __init__(
        self, model: str = "default", *, config: EngineConfig | None = None, **options: object
    ) -> None:
        if config is None or model != "default":
            options["model"] = model
        resolved = engine_config(options, config)
        from paceline.api.tokenizer import Tokenizer
        from paceline.engine.engine import Engine
        from paceline.models.source import resolve as find

        engine = Engine.build(resolved)
        try:
            tokenizer = Tokenizer.from_files(find(resolved.model).path)
        except BaseException:
            engine.close()
            raise
        self._open(engine, tokenizer)

    @classmethod
    def from_engine(cls, engine: ServedEngine, tokenizer: Tokenizer) -> Self:
        """Serve an engine that was built elsewhere; it is closed with this LLM."""
        llm = cls.__new__(cls)
        llm._open(engine, tokenizer)  # noqa: SLF001 (a second constructor)
        return llm

    def _open(self, engine: ServedEngine, tokenizer: Tokenizer) -> None:
        self.config: EngineConfig = engine.config
        self.model_config: ModelConfig = engine.model_config
        self.spec: DrafterSpec = engine.spec
        self.notes: tuple[str, ...] = engine.notes
        self.max_len: int = engine.max_len
        self.tokenizer: Tokenizer = tokenizer
        self._eos = frozenset(tokenizer.eos_token_ids) | frozenset(
            engine.model_config.eos_token_ids
        )
        self._ids = itertools.count()
        self._draw_seed = engine.draw_seed
        self._report = engine.report
        self._loop = EngineLoop(engine, prepare=_thread_setting(engine.config))
        # At exit, or when nobody holds this object: the thread must not outlive the interpreter.
        self._finalizer = weakref.finalize(self, self._loop.close)

    # -- whole answers ------------------------------------------------------------------------

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[Result]:
        """Continue prompts; they are decoded together. Ctrl-C ends what was submitted.

        Args:
            prompts: one prompt (text or token ids) or a sequence of prompts.
            params: for all prompts, or one per prompt; default: `SamplingParams()`.

        Returns:
            n results per prompt (n is the prompt's `SamplingParams.n`), in order of prompts, then
            of samples. The samples of a prompt share one seed and differ by their index.

        Raises:
            RequestError: a prompt or its parameters cannot be served; then none was started.
            EngineStoppedError: the engine has failed, or was closed.
        """
        completions = self._completions(_prompts(prompts), params)
        inbox: SimpleQueue[_Item] = SimpleQueue()
        results: dict[tuple[int, int], Result] = {}
        with self._submitted(completions, inbox.put) as seeds:
            seeds.result()
            while len(results) < len(completions):
                result = _opened(inbox.get()).result
                if result is not None:
                    results[result.prompt_index, result.sample_index] = result
        return [results[key] for key in sorted(results)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[Result]:
        """Answer one conversation, or several, through the model's chat template.

        Args:
            messages: `{"role": ..., "content": ...}` objects of one conversation, or a sequence of
                such conversations.
            params: as for `generate`.
            add_generation_prompt: end the prompt with the opening of the assistant's message.
            chat_template_kwargs: further variables for the template.

        Raises:
            TemplateError: the model has no chat template, or it refused the messages.
            RequestError, EngineStoppedError: as for `generate`.
        """
        prompts = [
            self.tokenizer.encode_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                **cast("dict[str, Any]", dict(chat_template_kwargs or {})),
            )
            for conversation in _conversations(messages)
        ]
        return self.generate(prompts, params)

    # -- answers in the making ----------------------------------------------------------------

    def iter_chunks(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Yield what each step adds; leaving the loop early ends the request.

        With n samples their chunks come mixed; `Chunk.sample_index` tells them apart.

        Raises:
            RequestError, EngineStoppedError: as for `generate`.
        """
        completions = self._completions([prompt], params)
        inbox: SimpleQueue[_Item] = SimpleQueue()
        left = len(completions)
        with self._submitted(completions, inbox.put) as seeds:
            seeds.result()
            while left:
                chunk = _opened(inbox.get())
                left -= chunk.result is not None
                yield chunk

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[Chunk]:
        """Yield what each step adds, without blocking the event loop.

        Cancelling, or leaving the loop and closing the generator, ends the request.

        Raises:
            RequestError, EngineStoppedError: as for `generate`.
        """
        completions = await asyncio.to_thread(self._completions, [prompt], params)
        inbox: asyncio.Queue[_Item] = asyncio.Queue()
        events = asyncio.get_running_loop()
        left = len(completions)
        with self._submitted(
            completions, lambda item: events.call_soon_threadsafe(inbox.put_nowait, item)
        ) as seeds:
            await asyncio.wrap_future(seeds)
            while left:
                chunk = _opened(await inbox.get())
                left -= chunk.result is not None
                yield chunk

    # -- the rest -----------------------------------------------------------------------------

    def report(self) -> dict[str, float]:
        """The engine's counters since its start."""
        return self._loop.call(self._report).result()

    def close(self) -> None:
        """End open requests and give back the engine's memory. Repeatable."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _completions(self, prompts: Sequence[Prompt], params: Params) -> list[Completion]:
        found = []
        for index, (prompt, param) in enumerate(zip(prompts, _each(params, prompts), strict=True)):
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            if param.n > 1 and param.seed is None:
                param = replace(param, seed=self._loop.call(self._draw_seed).result())  # noqa: PLW2901
            found += [
                Completion(
                    f"{next(self._ids)}",
                    ids,
                    param,
                    self.tokenizer,
                    eos_token_ids=self._eos,
                    prompt_index=index,
                    sample_index=sample,
                )
                for sample in range(param.n)
            ]
        return found

    def _submitted(
        self, completions: Sequence[Completion], put: Callable[[_Item], object]
    ) -> _Submitted:
        return _Submitted(self._loop, completions, put)


class _Submitted:
    """Requests that are open while the context is; whatever is unfinished then is aborted."""

    def __init__(
        self, loop: EngineLoop, completions: Sequence[Completion], put: Callable[[_Item], object]
    ) -> None:
        self._loop = loop
        self._open = {c.request.id: c for c in completions}
        self._put = put

    def __enter__(self) -> Future[tuple[int, ...]]:
        requests: list[Request] = [c.request for c in self._open.values()]
        return self._loop.submit(requests, self._take)

    def __exit__(self, *_: object) -> None:
        unfinished = tuple(self._open)
        if unfinished:
            self._loop.abort(unfinished)

    def _take(self, output: StepOutput | EngineStoppedError) -> None:
        """Runs on the loop's thread."""
        if isinstance(output, EngineStoppedError):
            self._put(output)
            return
        try:
            chunk = self._open[output.request_id].accept(output)
        except Exception as error:
            msg = f"the answer's text could not be made ({type(error).__name__}: {error})"
            self._put(PacelineError(msg))
            raise  # the loop logs it and aborts the request
        if chunk.result is not None:
            del self._open[output.request_id]
        self._put(chunk)


def _opened(item: _Item) -> Chunk:
    if isinstance(item, PacelineError):
        raise item
    return item


def _thread_setting(config: EngineConfig) -> Callable[[], object]:
    """PyTorch keeps the number of threads per calling thread."""

    def prepare() -> None:
        if config.threads is not None:
            import torch

            torch.set_num_threads(config.threads)

    return prepare


def _prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several -> several. A sequence of whole numbers is one prompt of token ids."""
    if isinstance(given, str):
        return [given]
    items = list(given)
    if all(isinstance(item, int) for item in items):
        return [items] if items else []  # type: ignore[list-item]
    bad = [i for i, item in enumerate(items) if isinstance(item, int | bytes)]
    if bad:
        msg = (
            f"prompt {bad[0]} of {len(items)} is {items[bad[0]]!r}; a prompt is text or a list of "
            "token ids, and prompts are a list of these"
        )
        raise RequestError(msg)
    return items  # type: ignore[return-value]


def _conversations(
    given: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    if given and all(isinstance(item, Mapping) for item in given):
        return [given]  # type: ignore[list-item]
    return list(given)  # type: ignore[arg-type]


def _each(params: Params, prompts: Sequence[object]) -> Sequence[SamplingParams]:
    if params is None:
        return [SamplingParams()] * len(prompts)
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if len(params) != len(prompts):
        msg = (
            f"{len(prompts)} prompts came with {len(params)} sampling parameters; pass one for "
            "all, or one per prompt"
        )
        raise RequestError(msg)
    return params
