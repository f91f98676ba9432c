"""`paceline bench`: accept length and speed of drafters, each beside its own baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from paceline.bench.run import Settings
from paceline.cli import bench_serve, bench_steps
from paceline.cli.console import epilogue, in_paragraphs, notes, progress
from paceline.cli.flags import SpecChoices, with_flags
from paceline.cli.workbench import AsJson
from paceline.core.errors import ConfigError

_INFLATES = "ignore_eos: text after the end of an answer repeats itself and inflates accept length"
_NOISE = "none: drafts nothing, so its speed ratio shows the noise of this measurement"


BENCH = App(name="bench", help_format="plaintext")
_EXAMPLES = (
    "paceline bench prompts.jsonl --spec ngram --spec suffix:path --spec suffix:tree",
    "paceline bench question.jsonl --category qa --limit 10 --temperature 1 --repeats 3",
    "paceline bench HumanEval.jsonl.gz --raw --concurrency 8 > record.json",
    "paceline bench steps --help   (single steps, from a configuration alone)",
    "paceline bench serve --help   (an OpenAI-compatible server)",
)


@with_flags
def bench(
    prompts: Annotated[
        list[Path] | None,
        Parameter(
            help="JSONL files, gzipped or not, in the shape of Spec-Bench ('turns'), SPEED-Bench "
            "('messages'), GSM8K ('question'), HumanEval or plain ('prompt')"
        ),
    ] = None,
    /,
    *,
    settings: Settings,
    choices: SpecChoices,
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
    plot: Annotated[
        Path | None, Parameter(help="draw the record into this .png, .svg or .pdf (matplotlib)")
    ] = None,
) -> int:
    """Measure drafters on prompts: accept length, speed against no drafting, equal outputs.

    Each drafter and its own autoregressive baseline take turns, prompt by prompt, in one process.
    A table goes to stderr, and one JSON record is the last line of stdout; a terminal shows it with
    --json only.
    """
    if not prompts:
        msg = "no prompts: name one or more JSONL files, such as Spec-Bench's question.jsonl"
        raise ConfigError(msg)
    _check(settings, limit)
    from paceline.api.probes import probes_of
    from paceline.bench import plot as plots
    from paceline.bench.report import SpecRun, record, table
    from paceline.bench.run import run
    from paceline.bench.workload import load
    from paceline.cli.workbench import (
        Workbench,
        check_lengths,
        command_line,
        encode,
        publish,
        stop_ids,
        tokenizer,
    )

    if plot is not None:
        plots.check(plot)
    workload = load(prompts, categories=category or (), limit=limit, raw=raw)
    tokens = tokenizer(choices.items[0].config)
    tasks = encode(workload, tokens)
    workbench = Workbench()
    runs = []
    for choice in choices.items:
        with (
            workbench.engine(choice.config, lambda: probes_of(tokens)) as engine,
            progress(choice.spec) as bar,
        ):
            check_lengths(tasks, engine.max_len, engine.model_config.max_position)
            slices = run(engine, tasks, settings, stop_ids=stop_ids(tokens, engine), progress=bar)
            runs.append(
                SpecRun(
                    spec=choice.spec,
                    config=engine.config,
                    notes=engine.notes,
                    tasks=tasks,
                    slices=slices,
                )
            )
    warnings = [_INFLATES] if settings.ignore_eos else []
    warnings += [_NOISE] if any(c.config.draft.method == "none" for c in choices.items) else []
    console = notes()
    console.print(table(runs))
    for warning in warnings:
        console.print(f"note: {warning}")
    made = record(runs, workload, settings, command=command_line(), warnings=warnings)
    if plot is not None:
        plots.draw(made, plot)
    publish(made, out, as_json=as_json)
    return 0


BENCH.help_epilogue = epilogue(_EXAMPLES)
BENCH.default(bench)
BENCH.command(
    bench_steps.steps,
    name="steps",
    help=in_paragraphs(bench_steps.steps.__doc__),
    help_epilogue=epilogue(bench_steps.EXAMPLES),
)
BENCH.command(
    bench_serve.serve,
    name="serve",
    help=in_paragraphs(bench_serve.serve.__doc__),
    help_epilogue=epilogue(bench_serve.EXAMPLES),
)


def _check(settings: Settings, limit: int | None) -> None:
    problems = [
        f"--{name.replace('_', '-')} {value} must be >= {low}"
        for name, value, low in (
            ("max_tokens", settings.max_tokens, 1),
            ("repeats", settings.repeats, 1),
            ("warmup", settings.warmup, 0),
            ("concurrency", settings.concurrency, 1),
            ("limit", limit, 1),
        )
        if value is not None and value < low
    ]
    if problems:
        msg = "invalid options: " + "; ".join(problems)
        raise ConfigError(msg)
