"""OpenEngine: an engine in its background thread with the tokenizer it is asked through. The base of LLM.

Not for: the ways to ask it (llm.py).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from paceline.api.completion import Completion, started
from paceline.api.loop import EngineLoop, ServedEngine
from paceline.api.prompts import Params, Prompt, one_each

if TYPE_CHECKING:
    from paceline.api.grammar import Constraints
    from paceline.api.tokenizer import Tokenizer
    from paceline.core.config import EngineConfig, ModelConfig
    from paceline.core.errors import EngineStoppedError
    from paceline.core.request import Constraint, SamplingParams
    from paceline.draft.base import DrafterSpec


class OpenEngine:
    """What is asked, until it is closed; made by `from_engine`, or by LLM's constructor."""

    @classmethod
    def from_engine(cls, engine: ServedEngine, tokenizer: Tokenizer) -> Self:
        """Serve an engine that was built elsewhere; it is closed with this object."""
        made = cls.__new__(cls)
        made._open(engine, tokenizer)  # noqa: SLF001 (a second constructor)
        return made

    def _open(self, engine: ServedEngine, tokenizer: Tokenizer) -> None:
        self.config: EngineConfig = engine.config
        self.model_config: ModelConfig = engine.model_config
        self.spec: DrafterSpec = engine.spec
        self.notes: tuple[str, ...] = engine.notes
        self.max_len: int = engine.max_len
        self.tokenizer: Tokenizer = tokenizer
        ends = (*tokenizer.eos_token_ids, *engine.model_config.eos_token_ids)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        self._ids = itertools.count()
        self._loop: EngineLoop[ServedEngine] = EngineLoop(
            engine, prepare=_thread_setting(engine.config)
        )
        # At exit, or when nobody holds this object: the thread must not outlive the interpreter.
        self._finalizer = weakref.finalize(self, self._loop.close)

    @cached_property
    def constraints(self) -> Constraints:
        """Compiles what answers have to match: schemas, regular expressions, choices, grammars.

        Raises:
            ConfigError: the package llguidance, of the extra `server`, is not installed.
            ConstraintError: the model names no end-of-text id.
        """
        from paceline.api.grammar import Constraints

        return Constraints(self.tokenizer, self.model_config.vocab_size, self.eos_token_ids)

    def report(self) -> dict[str, float]:
        """The engine's counters since its start."""
        return self.ask_report().result()

    def ask_report(self) -> Future[dict[str, float]]:
        """The same, without waiting for the step that is running.

        Raises:
            EngineStoppedError: the engine has failed, or was closed.
        """
        return self._loop.call(lambda engine: engine.report())

    @property
    def stopped(self) -> EngineStoppedError | None:
        """Why no more requests are taken; None while they are."""
        return self._loop.stopped

    @property
    def step_seconds(self) -> float:
        """How long the engine's running step has taken so far; 0 between steps and without work."""
        return self._loop.step_seconds

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

    def _completions(
        self, prompts: Sequence[Prompt], params: Params, constraint: Constraint | None
    ) -> list[Completion]:
        found = []
        for index, (prompt, param) in enumerate(
            zip(prompts, one_each(params, prompts), strict=True)
        ):
            ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            if param.n > 1 and param.seed is None:
                seed = self._loop.call(lambda engine: engine.draw_seed()).result()
                param = replace(param, seed=seed)  # noqa: PLW2901
            found += [self._completion(ids, param, index, s, constraint) for s in range(param.n)]
        return found

    def _completion(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        prompt_index: int,
        sample_index: int,
        constraint: Constraint | None = None,
        **asked: Any,
    ) -> Completion:
        return Completion(
            f"{next(self._ids)}",
            ids,
            params,
            self.tokenizer,
            eos_token_ids=frozenset(self.eos_token_ids),
            prompt_index=prompt_index,
            sample_index=sample_index,
            grammar=started(constraint, ignore_eos=params.ignore_eos),
            **asked,
        )


def _thread_setting(config: EngineConfig) -> Callable[[], object]:
    """PyTorch keeps the number of threads per calling thread."""

    def prepare() -> None:
        if config.threads is not None:
            import torch

            torch.set_num_threads(config.threads)

    return prepare
