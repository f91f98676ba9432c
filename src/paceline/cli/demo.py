"""`paceline demo`: one prompt, with the drafter and without, side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.table import Table

from paceline.bench.prompts import DEMO, DEMO_COPY
from paceline.cli.console import PlainConsole, notes, read_prompt
from paceline.cli.flags import with_flags
from paceline.cli.generate import loaded, stream_text
from paceline.core.config import EngineConfig
from paceline.core.request import SamplingParams

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.api.results import Result

_MAX_TOKENS = 160
_WARM_UP = ("Say hello.", 8)  # prompt, tokens
_ABOUT_COPY = (
    "This drafter copies, so the default prompt asks for a copy of a text: there it shows what it can "
    "do."
)
_NEXT = (
    "Next: paceline chat --temperature 0 'Name three colours.', or paceline --help for the rest."
)


@with_flags
def demo(
    prompt: Annotated[
        str | None,
        Parameter(
            help="what to ask; default: a small task for a drafter that was trained on the model, "
            "the copy of a text for one that copies"
        ),
    ] = None,
    /,
    *,
    config: EngineConfig,
    max_tokens: Annotated[int, Parameter(help="most tokens to be made")] = _MAX_TOKENS,
    temperature: Annotated[float, Parameter(help="0 is greedy")] = 0.0,
    seed: Annotated[int, Parameter(help="the same seed repeats the same answer")] = 0,
) -> int:
    """Answer a prompt with the drafter, then without, and compare speed and output."""
    drafted = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    plain = replace(drafted, num_speculative_tokens=0)
    # Without the prefix cache both ways compute the whole prompt.
    config = replace(config, cache=replace(config.cache, prefix_cache=False))
    console = PlainConsole(highlight=False)
    with loaded(config) as llm:
        trained = llm.config.draft.model is not None
        default = DEMO if trained else DEMO_COPY
        text = default if prompt is None else read_prompt(prompt)
        with notes().status("warming up"):
            _warm_up(llm, drafted, plain)
        ids = llm.tokenizer.encode_chat([{"role": "user", "content": text}])
        if prompt is None:
            if not trained:
                console.print(_ABOUT_COPY, style="dim")
            console.print(f"prompt: {text}", style="dim", markup=False)
        results = {}
        for name, params in ((llm.config.draft.method, drafted), ("autoregressive", plain)):
            console.print(f"\n[bold]{name}[/bold]")
            results[name] = stream_text(llm, ids, params)
        console.print()
        console.print(_table(results))
        console.print(_comparison(llm, results, plain), markup=False)
    notes().print(_NEXT, style="dim", markup=False)
    return 0


def _warm_up(llm: LLM, *ways: SamplingParams) -> None:
    """First passes set up kernels; nobody's figure should carry that."""
    text, count = _WARM_UP
    ids = llm.tokenizer.encode_chat([{"role": "user", "content": text}])
    for params in ways:
        llm.generate(ids, replace(params, max_tokens=count))


def _table(results: dict[str, Result]) -> Table:
    table = Table()
    for column in ("", "tokens/s", "accept length", "steps", "tokens", "prompt tokens"):
        table.add_column(column, justify="right" if column else "left")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.tokens_per_second:.1f}",
            f"{result.accept_length:.2f}",
            str(result.stats.num_steps),
            str(len(result.token_ids)),
            str(result.stats.num_prompt_tokens),
        )
    return table


def _comparison(llm: LLM, results: dict[str, Result], params: SamplingParams) -> str:
    """Whether both answers are the same; where they are not, how close the choice was."""
    drafted, plain = results.values()
    if drafted.token_ids == plain.token_ids:
        return f"The outputs are equal: all {len(plain.token_ids)} tokens are the same."
    again = llm.generate(plain.prompt_ids, replace(params, seed=plain.seed, logprobs=2))[0]
    pairs = zip(plain.token_ids, drafted.token_ids, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), len(again.token_ids) - 1)
    top = again.logprobs[index].top if again.logprobs and index < len(again.logprobs) else ()
    gap = f"{top[0].logprob - top[1].logprob:.6g}" if len(top) >= 2 else "unknown"
    return (
        f"The outputs differ from output token {index} on, where the gap of the two best logits is "
        f"{gap}. This machine rounds differently for different numbers of rows; see "
        "'paceline doctor'."
    )
