"""`paceline check`: its commands; and `lossless`: are a drafter's tokens the autoregressive tokens?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from paceline.bench.run import Settings
from paceline.cli import check_drafter
from paceline.cli.console import epilogue, notes, progress
from paceline.cli.flags import SpecChoices, with_flags
from paceline.cli.workbench import AsJson
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.api.tokenizer import Tokenizer
    from paceline.bench.lossless import FirstDifference, Verdict
    from paceline.bench.workload import Workload

CHECKS = App(name="check", help="Check what Paceline promises.", help_format="plaintext")
_EXAMPLES = (
    "paceline check lossless",
    "paceline check lossless question.jsonl --limit 10 --spec ngram --spec suffix",
)


@with_flags
def lossless(
    prompts: Annotated[
        list[Path] | None,
        Parameter(help="JSONL files as for bench; default: a few built-in prompts"),
    ] = None,
    /,
    *,
    choices: SpecChoices,
    max_tokens: Annotated[int, Parameter(help="output tokens per prompt, at most")] = 128,
    temperature: Annotated[
        list[float] | None,
        Parameter(
            help="sampling temperature; give it several times; default: 0 and 1",
            negative_iterable=(),
        ),
    ] = None,
    seed: Annotated[int, Parameter(help="seed of the first prompt; the others follow")] = 0,
    concurrency: Annotated[int, Parameter(help="requests decoded at the same time")] = 1,
    category: Annotated[
        list[str] | None,
        Parameter(help="only this group or category; give it several times", negative_iterable=()),
    ] = None,
    limit: Annotated[
        int | None, Parameter(help="prompts per group, its categories in turn")
    ] = None,
    raw: Annotated[
        bool, Parameter(negative="", help="prompts as they are, without the chat template")
    ] = False,
    out: Annotated[Path | None, Parameter(help="write the record to this file too")] = None,
    as_json: AsJson = False,
) -> int:
    """Compare a drafter's tokens with autoregressive tokens; exit code 1 where they differ.

    The first difference is shown with the gap between the two best logits there: a tiny gap means
    that rounding flipped the choice (above temperature 0 noise is added to both, so the gap says
    less). One JSON record is the last line of stdout; a terminal shows it with --json only.
    """
    problems = [
        f"--{name} {value} must be >= 1"
        for name, value in (
            ("max-tokens", max_tokens),
            ("concurrency", concurrency),
            ("limit", limit),
        )
        if value is not None and value < 1
    ]
    if problems:
        msg = "invalid options: " + "; ".join(problems)
        raise ConfigError(msg)
    from paceline.bench import lossless as check
    from paceline.bench.run import run
    from paceline.cli.workbench import (
        Workbench,
        check_lengths,
        command_line,
        encode,
        publish,
        stop_ids,
        tokenizer,
    )

    workload = _workload(prompts, category, limit, raw=raw)
    tokens = tokenizer(choices.items[0].config)
    tasks = encode(workload, tokens)
    workbench = Workbench()
    verdicts = []
    settings = Settings(max_tokens=max_tokens, seed=seed, concurrency=concurrency, warmup=0)
    for choice in choices.items:
        with workbench.engine(choice.config) as engine:
            config = engine.config
            check_lengths(tasks, engine.max_len, engine.model_config.max_position)
            for degree in temperature or (0.0, 1.0):
                settings = Settings(
                    max_tokens=max_tokens,
                    temperature=degree,
                    seed=seed,
                    concurrency=concurrency,
                    warmup=0,
                )
                with progress(f"{choice.spec}, temperature {degree:g}") as bar:
                    slices = run(
                        engine,
                        tasks,
                        settings,
                        stop_ids=stop_ids(tokens, engine),
                        progress=bar,
                        baseline_logprobs=check.TOP_LOGPROBS,
                    )
                verdict = check.judge(choice.spec, degree, tasks, slices)
                _show(verdict, tokens)
                verdicts.append(verdict)
    publish(
        check.record(verdicts, workload, settings, config, command=command_line()),
        out,
        as_json=as_json,
    )
    return 0 if all(v.equal for v in verdicts) else 1


CHECKS.command(lossless, name="lossless", help_epilogue=epilogue(_EXAMPLES))
CHECKS.command(
    check_drafter.drafter, name="drafter", help_epilogue=epilogue(check_drafter.EXAMPLES)
)


def _workload(
    prompts: Sequence[Path] | None, category: Sequence[str] | None, limit: int | None, *, raw: bool
) -> Workload:
    from paceline.bench.prompts import BUILT_IN
    from paceline.bench.workload import load, plain

    if prompts:
        return load(prompts, categories=category or (), limit=limit, raw=raw)
    if category or raw:
        msg = "--category and --raw belong to prompts from files; name a JSONL file"
        raise ConfigError(msg)
    return plain(BUILT_IN[:limit], group="built-in")


def _show(verdict: Verdict, tokens: Tokenizer) -> None:
    console = notes()
    console.print(
        f"{verdict.spec}, temperature {verdict.temperature:g}: {verdict.num_equal} of "
        f"{verdict.num_prompts} answers equal ({verdict.num_tokens} tokens, accept length "
        f"{verdict.accept_length:.2f})"
    )
    if verdict.differences:
        console.print(
            "  first difference: " + describe(verdict.differences[0], tokens), markup=False
        )


def describe(first: FirstDifference, tokens: Tokenizer) -> str:
    """A difference in words."""

    def name(token: int | None) -> str:
        return "the end" if token is None else f"{token} {tokens.token_text(token)!r}"

    gap = "unknown" if first.logit_gap is None else f"{first.logit_gap:.6g}"
    return (
        f"prompt {first.prompt}, output token {first.index}: {name(first.baseline_token)} "
        f"autoregressively, {name(first.draft_token)} with drafts; logit gap of the two best {gap}"
    )
