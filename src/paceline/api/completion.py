"""Completion: one answer on its way; turns an engine's outputs into chunks and a result.

It lives on the engine loop's thread (`accept` is called there, and so is its `Stopper`), so text is
ready before another thread hears of it. Not for: stop strings (text_stream.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.api.results import Alternative, Chunk, Result, TokenLogprob
from paceline.api.text_stream import TextStream
from paceline.api.tokenizer import Tokenizer
from paceline.core.errors import RequestError, quoted
from paceline.core.request import (
    Constraint,
    FinishReason,
    Grammar,
    Request,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)


def started(constraint: Constraint | None, *, ignore_eos: bool = False) -> Grammar | None:
    """A grammar of its own for one answer.

    Args:
        constraint: as the caller gave it; None: anything may be answered.
        ignore_eos: see `Constraint.start`.

    Raises:
        RequestError: it is no constraint.
    """
    if constraint is None:
        return None
    start = getattr(constraint, "start", None)
    if isinstance(constraint, type) or not callable(start):
        msg = (
            f"constraint is {quoted(constraint)}; one that LLM.constraints has compiled is possible, before "
            "start(); pass llm.constraints.json_schema(...), .regex(...), .choice(...) or .lark(...)"
        )
        raise RequestError(msg)
    grammar: Grammar = start(ignore_eos=ignore_eos)
    return grammar


class Completion:
    """Collects one answer.

    Args:
        request_id: unique in the engine.
        prompt_ids: the prompt.
        params: how to sample; `n` is the caller's business.
        tokenizer: the model's.
        eos_token_ids: ids that end a text, unless the parameters ignore them.
        prompt_index, sample_index: which prompt of a call, which of its samples.
        grammar: state of the rule that the answer keeps, if one; this answer's own.
        scope, shows_trees, lists_steps, prompt_logprobs: see `Request`.
    """

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: frozenset[int],
        prompt_index: int = 0,
        sample_index: int = 0,
        grammar: Grammar | None = None,
        scope: str = "",
        shows_trees: bool = False,
        lists_steps: bool = False,
        prompt_logprobs: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt_index = prompt_index
        self._stream = TextStream.of_params(tokenizer, prompt_ids, params)
        self._token_ids: list[int] = []
        self._sources: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: Sequence[TokenLogprob | None] | None = None
        stop_ids = frozenset(params.stop_token_ids)
        # A grammar allows these ids at its end alone, and keeps `ignore_eos` by itself.
        if grammar is not None or not params.ignore_eos:
            stop_ids |= eos_token_ids
        self.request = Request(
            id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            sample_index=sample_index,
            stop_ids=stop_ids,
            stopper=self,
            grammar=grammar,
            scope=scope,
            shows_trees=shows_trees,
            lists_steps=lists_steps,
            prompt_logprobs=prompt_logprobs,
        )

    def feed(self, token_ids: Sequence[int]) -> int | None:
        """Implement `Stopper`: stop strings are looked for in all but a stop id's own text."""
        hidden = not self.request.params.include_stop_str_in_output
        if hidden and token_ids and token_ids[-1] in self.request.stop_ids:
            token_ids = token_ids[:-1]
        return self._stream.feed(token_ids)

    def accept(self, output: StepOutput) -> Chunk:
        """Take one output of the engine for this request."""
        self._token_ids += output.token_ids
        self._sources += output.sources
        logprobs = None
        if output.logprobs is not None:
            logprobs = [
                self._named(token_id, values)
                for token_id, values in zip(output.token_ids, output.logprobs, strict=True)
            ]
            self._logprobs += logprobs
        of_prompt = self._of_prompt(output)
        if output.finish_reason is None:
            text, result = self._stream.take(), None
        else:
            text = self._stream.finish()
            result = self._result(output)
        return Chunk(
            prompt_index=self._prompt_index,
            sample_index=self.request.sample_index,
            text=text,
            token_ids=tuple(output.token_ids),
            sources=tuple(output.sources),
            logprobs=logprobs,
            finish_reason=None if result is None else result.finish_reason,
            result=result,
            trees=() if output.tree is None else (output.tree,),
            prompt_logprobs=of_prompt,
        )

    def _of_prompt(self, output: StepOutput) -> Sequence[TokenLogprob | None] | None:
        """The prompt's log-probabilities, if they come with this output; kept for the result."""
        if output.prompt_logprobs is None:
            return None
        self._prompt_logprobs = tuple(
            None if values is None else self._named(token_id, values)
            for token_id, values in zip(
                self.request.prompt_ids, output.prompt_logprobs, strict=True
            )
        )
        return self._prompt_logprobs

    def _result(self, output: StepOutput) -> Result:
        assert output.stats is not None, "the last output carries the statistics"
        assert output.finish_reason is not None
        wanted = self.request.params.logprobs
        return Result(
            prompt_index=self._prompt_index,
            sample_index=self.request.sample_index,
            prompt_ids=self.request.prompt_ids,
            text=self._stream.text,
            token_ids=tuple(self._token_ids),
            finish_reason=output.finish_reason.value,
            stop_reason=self._stop_reason(output),
            logprobs=None if wanted is None else tuple(self._logprobs),
            sources=tuple(self._sources),
            stats=output.stats,
            error=output.error,
            fault=output.fault,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _stop_reason(self, output: StepOutput) -> int | str | None:
        if output.finish_reason is not FinishReason.STOP:
            return None
        if output.stop_token_id is None:
            return self._stream.stop_string
        named = output.stop_token_id in self.request.params.stop_token_ids
        return output.stop_token_id if named else None

    def _named(self, token_id: int, values: TokenLogprobs) -> TokenLogprob:
        text = self._tokenizer.token_text
        return TokenLogprob(
            token_id=token_id,
            token=text(token_id),
            logprob=values.logprob,
            top=tuple(
                Alternative(token_id=i, token=text(i), logprob=p)
                for i, p in zip(values.top_ids, values.top_logprobs, strict=True)
            ),
            rank=values.rank,
        )
