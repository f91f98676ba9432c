"""LLM: text in, text out, over an engine in a background thread. The public Python interface.

    with LLM(spec="suffix") as llm:
        for result in llm.generate(["One", "Two"], SamplingParams(max_tokens=32)):
            print(result.text, result.accept_length)

Any number of threads and coroutines may use one LLM at the same time; their requests are decoded
together. Not for: its life (open_engine.py), a server's protocol, or a prompt's tokens
(tokenizer.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

from paceline.api.answers import Answers, Relay
from paceline.api.loop import ServedEngine
from paceline.api.open_engine import OpenEngine
from paceline.api.options import engine_config
from paceline.api.prompts import (
    Params,
    Prompt,
    as_conversations,
    as_prompts,
    template_variables,
)
from paceline.api.results import Chunk, Result
from paceline.api.submission import Item, Submitted, opened
from paceline.core.request import SamplingParams
from paceline.core.stages import Stages, silent

if TYPE_CHECKING:
    from paceline.api.chat_template import Message
    from paceline.api.tokenizer import Tokenizer
    from paceline.core.config import EngineConfig
    from paceline.core.request import Constraint
    from paceline.engine.fitness import Probes


class LLM(OpenEngine):
    """A model that answers.

    Args:
        model: folder, GGUF file, hub id, or "default".
        config: start from this config instead of the defaults.
        progress: told what `Engine.build` tells: graphs captured, and of how many (GPU).
        stages: who measures the parts of a step.
        **options: flat names of config fields: max_len, max_rows, memory_gb, dtype, weights, ...;
            `spec` is the drafter ("none", "ngram", "suffix", "suffix:path"), `spec_nodes` its most
            draft nodes per step, `speculative_config` a mapping with vLLM's keys.

    Raises:
        ConfigError: an unknown option, a value that cannot be served, or a drafter network that was
            made for another model (a new one is tested first; `spec_check="off"` leaves that out).
        ModelError: the model's files are missing, damaged or not supported.
    """

    def __init__(
        self,
        model: str = "default",
        *,
        config: EngineConfig | None = None,
        progress: Callable[[int, int], None] | None = None,
        stages: Stages = silent,
        **options: object,
    ) -> None:
        if config is None or model != "default":
            options["model"] = model
        resolved = engine_config(options, config)
        from paceline.api.probes import probes_of
        from paceline.api.tokenizer import Tokenizer
        from paceline.engine.engine import Engine
        from paceline.models.source import resolve as find

        def probes() -> Probes:
            return probes_of(Tokenizer.from_files(find(resolved.model).path))

        engine = Engine.build(resolved, probes=probes, progress=progress, stages=stages)
        try:
            tokenizer = Tokenizer.from_files(find(resolved.model).path)
        except BaseException:
            engine.close()
            raise
        self._open(engine, tokenizer)

    def _open(self, engine: ServedEngine, tokenizer: Tokenizer) -> None:
        super()._open(engine, tokenizer)
        self._relays: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Relay] = (
            weakref.WeakKeyDictionary()
        )

    # -- whole answers ------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        constraint: Constraint | None = None,
    ) -> list[Result]:
        """Continue prompts; they are decoded together. Ctrl-C ends what was submitted.

        Args:
            prompts: one prompt (text or token ids) or a sequence of prompts.
            params: for all prompts, or one per prompt; default: `SamplingParams()`.
            constraint: what every answer has to match, of `constraints`; default: anything.

        Returns:
            n results per prompt (n is the prompt's `SamplingParams.n`), in order of prompts, then
            of samples. The samples of a prompt share one seed and differ by their index.

        Raises:
            RequestError: a prompt or its parameters cannot be served; then none was started.
            EngineStoppedError: the engine has failed, or was closed.
        """
        completions = self._completions(as_prompts(prompts), params, constraint)
        inbox: SimpleQueue[Item] = SimpleQueue()
        results: dict[tuple[int, int], Result] = {}
        with Submitted(self._loop, completions, inbox.put) as seeds:
            seeds.result()
            while len(results) < len(completions):
                result = opened(inbox.get()).result
                if result is not None:
                    results[result.prompt_index, result.sample_index] = result
        return [results[key] for key in sorted(results)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        constraint: Constraint | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[Result]:
        """Answer one conversation, or several, through the model's chat template.

        Args:
            messages: `{"role": ..., "content": ...}` objects of one conversation, or a sequence of
                such conversations.
            params: as for `generate`.
            constraint: as for `generate`.
            add_generation_prompt: end the prompt with the opening of the assistant's message.
            chat_template_kwargs: further variables for the template.

        Raises:
            TemplateError: the model has no chat template, or it refused the messages.
            RequestError, EngineStoppedError: as for `generate`.
        """
        variables = template_variables(chat_template_kwargs)
        prompts = [
            self.tokenizer.encode_chat(
                conversation, add_generation_prompt=add_generation_prompt, **variables
            )
            for conversation in as_conversations(messages)
        ]
        return self.generate(prompts, params, constraint=constraint)

    # -- answers in the making ----------------------------------------------------------------

    def iter_chunks(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        constraint: Constraint | None = None,
    ) -> Iterator[Chunk]:
        """Yield what each step adds; leaving the loop early ends the request.

        With n samples their chunks come mixed; `Chunk.sample_index` tells them apart. Arguments are those
        of `generate`.

        Raises:
            RequestError, EngineStoppedError: as for `generate`.
        """
        completions = self._completions([prompt], params, constraint)
        inbox: SimpleQueue[Item] = SimpleQueue()
        left = len(completions)
        with Submitted(self._loop, completions, inbox.put) as seeds:
            seeds.result()
            while left:
                chunk = opened(inbox.get())
                left -= chunk.result is not None
                yield chunk

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        constraint: Constraint | None = None,
    ) -> AsyncIterator[Chunk]:
        """Yield what each step adds, without blocking the event loop.

        Cancelling, or leaving the loop and closing the generator, ends the request.

        Raises:
            RequestError, EngineStoppedError: as for `generate`.
        """
        completions = await asyncio.to_thread(self._completions, [prompt], params, constraint)
        with contextlib.closing(
            await Answers.submit(self._loop, completions, self._relay())
        ) as answers:
            async for chunk in answers:
                yield chunk

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        constraint: Constraint | None = None,
        scope: str = "",
        shows_trees: bool = False,
        lists_steps: bool = False,
        prompt_logprobs: int | None = None,
    ) -> Answers:
        """Let prompts be continued together; for servers, which read chunks of all of them.

        Args:
            prompts: token ids.
            params: for all of them.
            constraint: a rule that every answer keeps.
            scope: prefix cache and suffix tree share nothing across scopes.
            shows_trees: chunks carry the trees that were verified, where the host knows them.
            lists_steps: results' statistics have what each step drafted and accepted.
            prompt_logprobs: results have the log-probabilities of their prompts' tokens; see `Request`.

        Returns:
            An async iterator of chunks, once the engine has taken the requests. Close it.

        Raises:
            RequestError, EngineStoppedError: as for `generate`.
        """
        if params.n > 1 and params.seed is None:  # as for `generate`, but each prompt needs its own
            draws = [self._loop.call(lambda engine: engine.draw_seed()) for _ in prompts]
            seeds = [await asyncio.wrap_future(draw) for draw in draws]
            each = [replace(params, seed=seed) for seed in seeds]
        else:
            each = [params] * len(prompts)
        asked = {
            "scope": scope,
            "shows_trees": shows_trees,
            "lists_steps": lists_steps,
            "prompt_logprobs": prompt_logprobs,
        }
        completions = [
            self._completion(ids, of_prompt, prompt, sample, constraint, **asked)
            for prompt, (ids, of_prompt) in enumerate(zip(prompts, each, strict=True))
            for sample in range(params.n)
        ]
        return await Answers.submit(self._loop, completions, self._relay())

    def _relay(self) -> Relay:
        """Of the running event loop: whoever shares one shares its wake-ups."""
        events = asyncio.get_running_loop()
        relay = self._relays.get(events)
        if relay is None:
            relay = self._relays[events] = Relay(events)
        return relay
