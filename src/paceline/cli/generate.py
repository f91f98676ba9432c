"""`paceline generate`: continue a prompt, as it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.cli.console import read_prompt, remark_on, say, waiting
from paceline.cli.flags import with_flags
from paceline.core.config import EngineConfig
from paceline.core.errors import PacelineError
from paceline.core.request import SamplingParams

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.api.results import Result


@with_flags
def generate(
    prompt: Annotated[
        str | None,
        Parameter(help="the text to continue; '-' or none: what stands on standard input"),
    ] = None,
    /,
    *,
    params: SamplingParams,
    config: EngineConfig,
    as_json: Annotated[
        bool,
        Parameter(name="--json", negative="", help="one JSON object per answer instead of text"),
    ] = False,
    stats: Annotated[
        bool | None,
        Parameter(help="remarks on speed and accept length; default: if stderr is a terminal"),
    ] = None,
) -> int:
    """Continue a prompt; the text streams as it is made."""
    text = read_prompt(prompt)
    with loaded(config) as llm:
        return answer(llm, llm.tokenizer.encode(text), params, as_json=as_json, stats=stats)


@contextmanager
def loaded(config: EngineConfig) -> Iterator[LLM]:
    """An LLM for the time of the context; while it loads, a terminal shows that."""
    from paceline.api.llm import LLM

    with waiting(
        f"loading {config.model} (the first start takes longer)", "capturing CUDA graphs"
    ) as bar:
        llm = LLM(config=config, progress=bar)
    with llm:
        yield llm


def answer(
    llm: LLM, prompt_ids: list[int], params: SamplingParams, *, as_json: bool, stats: bool | None
) -> int:
    """Answer one prompt on stdout: streamed text, numbered texts (n > 1) or JSON lines."""
    if as_json:
        results = llm.generate(prompt_ids, params)
        for result in results:
            say(json.dumps(as_dict(result), ensure_ascii=False) + "\n")
    elif params.n > 1:
        results = llm.generate(prompt_ids, params)
        for result in results:
            say(f"--- {result.sample_index}\n{result.text}\n")
    else:
        results = [stream_text(llm, prompt_ids, params)]
    if sys.stderr.isatty() if stats is None else stats:
        for result in results:
            remark_on(remark(result))
    for result in results:
        if result.error is not None:
            raise PacelineError(result.error)
    return 0


def stream_text(llm: LLM, prompt_ids: list[int], params: SamplingParams) -> Result:
    """Write one answer's text to stdout as it is made, with a line end after it."""
    result, last = None, ""
    try:
        for chunk in llm.iter_chunks(prompt_ids, params):
            if chunk.text:
                say(chunk.text)
                last = chunk.text
            result = chunk.result
    finally:
        # Also after Ctrl-C: what stands there stays, on whole lines.
        if (last or result is not None) and not last.endswith("\n"):
            say("\n")
    assert result is not None, "the last chunk carries the result"
    return result


def remark(result: Result) -> str:
    """One line on how an answer was made."""
    stats = result.stats
    return (
        f"{len(result.token_ids)} tokens, {result.tokens_per_second:.1f} tok/s, "
        f"accept length {result.accept_length:.2f} over {stats.num_steps} steps, "
        f"{stats.num_prompt_tokens} prompt tokens ({stats.num_cached_tokens} cached), "
        f"finish {result.finish_reason}, seed {result.seed}"
    )


def as_dict(result: Result) -> dict[str, object]:
    """A result as a JSON object."""
    stats = result.stats
    shown: dict[str, object] = {
        "text": result.text,
        "sample_index": result.sample_index,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "seed": result.seed,
        "token_ids": list(result.token_ids),
        "sources": list(result.sources),
        "accept_length": round(result.accept_length, 4),
        "accept_histogram": list(result.accept_histogram),
        "num_steps": stats.num_steps,
        "num_drafted": stats.num_drafted,
        "num_accepted": stats.num_accepted,
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_cached_tokens": stats.num_cached_tokens,
        "prefill_s": round(stats.prefill_s, 6),
        "decode_s": round(stats.decode_s, 6),
    }
    if result.error is not None:
        shown["error"] = result.error
    if result.logprobs is not None:
        shown["logprobs"] = [
            {
                "token": p.token,
                "token_id": p.token_id,
                "logprob": p.logprob,
                "top": [
                    {"token": t.token, "token_id": t.token_id, "logprob": t.logprob} for t in p.top
                ],
            }
            for p in result.logprobs
        ]
    return shown
