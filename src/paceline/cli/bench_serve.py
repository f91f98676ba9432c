"""`paceline bench serve`: what users of an OpenAI-compatible server wait for, and what it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from paceline.cli.console import notes, progress
from paceline.cli.workbench import RECORD_HELP
from paceline.core import environment
from paceline.core.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from paceline.bench.serve_run import ServeReport

EXAMPLES = (
    "paceline bench serve --url http://localhost:8000 question.jsonl --concurrency 1,2,4,8",
    "paceline bench serve --url http://localhost:8000 question.jsonl --request-rate 2 \\",
    "    --goodput ttft:500,tpot:50 --out rate.json",
    "paceline bench serve --url http://localhost:8000 --random-input-len 512 --random-output-len 128",
    "paceline bench serve --url http://localhost:8000 question.jsonl --concurrency 1,4,16 \\",
    """    --variant 'plain={"speculative": {"enabled": false}}' --variant 'drafts={}' --plot sweep.svg""",
)
_WHAT = Group("What is asked", sort_key=10)
_HOW = Group("Load", sort_key=20)
_SERVER = Group("Server", sort_key=30)
_OUT = Group("Results", sort_key=40)


def serve(
    prompts: Annotated[
        list[Path] | None,
        Parameter(
            help="JSONL files, gzipped or not, in the shape of Spec-Bench ('turns'), SPEED-Bench "
            "('messages'), GSM8K ('question'), HumanEval or plain ('prompt'); first turns are asked"
        ),
    ] = None,
    /,
    *,
    url: Annotated[
        str,
        Parameter(name=["--url", "--base-url"], group=_SERVER, help="the server: http://HOST:PORT"),
    ],
    model: Annotated[
        str | None,
        Parameter(group=_SERVER, help="the model's name; default: the first that the server lists"),
    ] = None,
    endpoint: Annotated[
        str | None,
        Parameter(
            group=_SERVER,
            help="chat or completions; default: chat for prompts from files, completions for random ids",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        Parameter(
            group=_SERVER, help="sent as a bearer token; default: the variable OPENAI_API_KEY"
        ),
    ] = None,
    timeout: Annotated[
        float, Parameter(group=_SERVER, help="seconds after which a request has failed")
    ] = 600.0,
    num_prompts: Annotated[
        int | None,
        Parameter(
            group=_WHAT, help="requests of each run; default: as many as there are prompts, or 64"
        ),
    ] = None,
    category: Annotated[
        list[str] | None,
        Parameter(
            group=_WHAT,
            help="only this group or category; give it several times",
            negative_iterable=(),
        ),
    ] = None,
    random_input_len: Annotated[
        int | None,
        Parameter(group=_WHAT, help="in place of files: prompts of so many random token ids"),
    ] = None,
    random_output_len: Annotated[
        int | None, Parameter(group=_WHAT, help="their answers' tokens; default: --max-tokens")
    ] = None,
    random_range_ratio: Annotated[
        float, Parameter(group=_WHAT, help="lengths vary by this share, both ways; below 1")
    ] = 0.0,
    max_tokens: Annotated[int, Parameter(group=_WHAT, help="output tokens, at most")] = 128,
    temperature: Annotated[float, Parameter(group=_WHAT, help="sampling temperature")] = 0.0,
    seed: Annotated[
        int,
        Parameter(group=_WHAT, help="of the first request, the order of prompts and sending times"),
    ] = 0,
    ignore_eos: Annotated[
        bool,
        Parameter(group=_WHAT, negative="", help="go on after end-of-text; inflates accept length"),
    ] = False,
    extra_body: Annotated[
        str | None,
        Parameter(
            group=_WHAT,
            help="JSON object: more of every request, for example '{\"top_k\": 20}'; null takes a key out",
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        Parameter(
            group=_WHAT,
            negative_iterable=(),
            help="NAME=JSON object: the same requests with this in their bodies; several take turns, and "
            "the first one is what the others are compared with",
        ),
    ] = None,
    salt: Annotated[
        bool,
        Parameter(
            group=_WHAT,
            help="a cache_salt of its own for each run, so that none profits from what others left in the "
            "server's prefix cache and suffix tree; --no-salt for servers that take no unknown fields",
        ),
    ] = True,
    concurrency: Annotated[
        str | None,
        Parameter(
            name=["--concurrency", "--max-concurrency"],
            group=_HOW,
            help="closed loop: so many requests at a time; several as 1,2,4,8; default: 1",
        ),
    ] = None,
    request_rate: Annotated[
        str | None,
        Parameter(
            group=_HOW, help="open loop: requests a second, several as 1,2,4; inf: all at once"
        ),
    ] = None,
    burstiness: Annotated[
        float,
        Parameter(
            group=_HOW, help="of an open loop: 1 is Poisson, less comes in bursts, more evenly"
        ),
    ] = 1.0,
    repeats: Annotated[int, Parameter(group=_HOW, help="runs of everything")] = 1,
    warmup: Annotated[
        int,
        Parameter(
            name=["--warmup", "--num-warmups"],
            group=_HOW,
            help="requests before each run that are not counted",
        ),
    ] = 1,
    goodput: Annotated[
        list[str] | None,
        Parameter(
            group=_OUT,
            consume_multiple=True,
            negative_iterable=(),
            help="count requests that keep these limits (milliseconds): ttft:200 tpot:50 e2el:5000",
        ),
    ] = None,
    save_detailed: Annotated[
        bool,
        Parameter(group=_OUT, negative="", help="keep lengths, times and texts of every request"),
    ] = False,
    out: Annotated[
        Path | None, Parameter(group=_OUT, help="write the record to this file too")
    ] = None,
    as_json: Annotated[
        bool, Parameter(name="--json", group=_OUT, negative="", help=RECORD_HELP)
    ] = False,
    plot: Annotated[
        Path | None,
        Parameter(group=_OUT, help="draw the sweep into this .png, .svg or .pdf (matplotlib)"),
    ] = None,
    beside: Annotated[
        list[Path] | None,
        Parameter(
            group=_OUT,
            negative_iterable=(),
            help="with --plot: an earlier record whose lines are drawn too; give it several times",
        ),
    ] = None,
) -> int:
    """Measure an OpenAI-compatible server: time to first token, time per token, throughput, acceptance.

    Answers are streamed, and tokens are those that the server reports. Acceptance comes from the
    server's /metrics, before and after each run. A table goes to stderr, and one JSON record with
    vLLM's keys is the last line of stdout; a terminal shows it with --json only.
    """
    from paceline.bench import plot as plots
    from paceline.bench import serve_plot, serve_report
    from paceline.bench.serve_run import ServeSettings, run
    from paceline.cli import bench_serve_words as words
    from paceline.cli.workbench import publish

    _check(max_tokens, repeats, warmup, num_prompts, timeout, temperature)
    if beside and plot is None:
        msg = "--beside names records for a picture, but none is asked for; add --plot FILE"
        raise ConfigError(msg)
    if plot is not None:
        plots.check(plot)
    earlier = {path.stem: serve_plot.read(path) for path in beside or ()}
    loads = words.loads(concurrency, request_rate, burstiness)
    kept, prompts = words.spaced(goodput or (), prompts or ())
    used, calls, number = words.workload(
        prompts,
        random_input_len,
        max_tokens if random_output_len is None else random_output_len,
        random_range_ratio,
        category or (),
        raw=endpoint == "completions",
        num_prompts=num_prompts,
        seed=seed,
    )
    settings = ServeSettings(
        url=url,
        model=model,
        endpoint=words.endpoint(endpoint, is_random=not prompts),
        loads=loads,
        num_prompts=number,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        repeats=repeats,
        warmup=warmup,
        timeout=timeout,
        salt=salt,
        extra=words.more_of_body(extra_body, ignore_eos=ignore_eos),
        variants=words.variants(variant or ()),
        goodput=words.limits(kept),
    )
    key = api_key if api_key is not None else environment.openai_key()
    with progress("answers") as bar:
        report = run(settings, calls, api_key=key, progress=bar)
    warnings = serve_report.warnings_of(report, settings, used)
    made = serve_report.record(
        report,
        settings,
        used,
        command=words.command_line(),
        warnings=warnings,
        detailed=save_detailed,
    )
    _show(report, made, warnings)
    if plot is not None:
        serve_plot.draw({**earlier, "this run": made}, plot)
    publish(made, out, as_json=as_json)
    if report.interrupted:
        raise KeyboardInterrupt
    wrong = serve_report.broken(report)
    if wrong is not None:
        raise PacelineError(wrong)
    return 0


def _show(report: ServeReport, made: Mapping[str, object], warnings: Sequence[str]) -> None:
    from paceline.bench.serve_tables import (
        details,
        failure_lines,
        groups_table,
        latency_table,
        throughput_table,
    )

    rows, results = made["summary"], made["results"]
    assert isinstance(rows, list)
    assert isinstance(results, list)
    console = notes()
    console.print(throughput_table(rows))
    console.print(details(results[0]) if len(results) == 1 else latency_table(rows))
    groups = groups_table(report)
    if groups is not None:
        console.print(groups)
    for line in [*failure_lines(results), *(f"note: {warning}" for warning in warnings)]:
        console.print(line, markup=False)


def _check(
    max_tokens: int,
    repeats: int,
    warmup: int,
    num_prompts: int | None,
    timeout: float,
    temperature: float,
) -> None:
    wanted = (
        ("max-tokens", max_tokens, 1),
        ("repeats", repeats, 1),
        ("warmup", warmup, 0),
        ("num-prompts", num_prompts, 1),
        ("temperature", temperature, 0),
    )
    problems = [
        f"--{name} is {value:g}; at least {low} is possible; raise it"
        for name, value, low in wanted
        if value is not None and not value >= low
    ]
    if not timeout > 0:
        problems.append(f"--timeout is {timeout:g}; more than 0 seconds are possible; raise it")
    if problems:
        msg = "invalid options: " + "; ".join(problems)
        raise ConfigError(msg)
