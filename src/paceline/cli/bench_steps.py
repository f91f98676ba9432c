"""`paceline bench steps`: what a decode step takes, from a configuration alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from paceline.cli.console import notes, progress
from paceline.cli.workbench import RECORD_HELP
from paceline.core.config import CacheConfig, DType, EngineConfig
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from paceline.bench.step_cases import Case, Spec
    from paceline.bench.steps import Bench, Measured, Settings
    from paceline.cost.hardware import Hardware

EXAMPLES = (
    "paceline bench steps --model qwen3-8b --random-weights \\",
    "    --sequences 1 8 64 --spec none --spec dflash:qwen3-8b-dflash-b16 \\",
    "    --spec ddtree:qwen3-8b-dflash-b16:32 --out steps.json",
    "paceline bench steps --model FOLDER --random-weights \\",
    "    --spec none --spec dflash:DRAFTER --accept-length 3.5",
    "paceline bench steps --model qwen3-8b --random-weights \\",
    "    --sequences 1 8 --spec none --spec chain:16",
    "paceline bench steps --model default --context 128 512 --steps 8",
)
_SYNTHETIC = "acceptance is synthetic: what was accepted was said beforehand, and the emitted tokens are no text"
_NO_GRAPH = (
    "{n} counted steps ran without a graph or made one: their times are not those of service"
)
_TOO_FAST = (
    "times below their floors: {n}; so the ceilings are too low: perhaps others used the device while they "
    "were measured; measure again when it is idle, with --measure-ceilings"
)
_WHAT = Group("What is measured", sort_key=10)
_HOW = Group("How", sort_key=20)
_ENGINE = Group("Engine", sort_key=30)


def steps(
    *,
    model: Annotated[
        str,
        Parameter(
            group=_WHAT,
            help="what --model is elsewhere, its matrices plain (as with --weights bf16); with "
            "--random-weights a folder with a config.json, that file, or a shape that comes along "
            "(qwen3-8b)",
        ),
    ],
    random_weights: Annotated[
        bool,
        Parameter(
            group=_WHAT,
            negative="",
            help="make weights of target and drafters on the device; no checkpoint is needed",
        ),
    ] = False,
    spec: Annotated[
        list[str] | None,
        Parameter(
            group=_WHAT,
            negative_iterable=(),
            help="drafter: none, or dflash or ddtree as METHOD:CONFIG[:NODES], where CONFIG is a folder, "
            "its config.json, or a shape that comes along, and NODES the tokens verified for a "
            "sequence, root included; or one that drafts nothing and costs nothing, to have trees "
            "verified: chain:NODES, the same chain for every sequence, or uneven:MEAN:MOST, chains of "
            "1 to MOST nodes, many short and few long ones, sequences times MEAN in every step; give "
            "it several times; default: none",
        ),
    ] = None,
    sequences: Annotated[
        list[int] | None,
        Parameter(
            group=_WHAT,
            consume_multiple=True,
            negative_iterable=(),
            help="sequences that decode together; one number or several; default: 1",
        ),
    ] = None,
    context: Annotated[
        list[int] | None,
        Parameter(
            group=_WHAT,
            consume_multiple=True,
            negative_iterable=(),
            help="tokens of each prompt; one number or several; default: 1024",
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        Parameter(
            group=_WHAT,
            consume_multiple=True,
            negative_iterable=(),
            help="SEQUENCESxCONTEXT, one or several, in place of --sequences and --context: just these",
        ),
    ] = None,
    accept_length: Annotated[
        float | None,
        Parameter(
            group=_HOW,
            help="synthetic acceptance: this many tokens a step on average, bonus included",
        ),
    ] = None,
    accept_rates: Annotated[
        str | None,
        Parameter(
            group=_HOW,
            help="synthetic acceptance: share of steps that accept the first, second, ... draft token, "
            "not rising, for example .8,.6,.4",
        ),
    ] = None,
    count: Annotated[int, Parameter(group=_HOW, name="--steps", help="steps of a repeat")] = 32,
    repeats: Annotated[
        int, Parameter(group=_HOW, help="repeats, after one that is not counted")
    ] = 5,
    warmup: Annotated[int, Parameter(group=_HOW, help="steps before those of each repeat")] = 4,
    rest: Annotated[
        float,
        Parameter(
            group=_HOW,
            help="seconds of rest before each repeat: with few steps, a GPU still has its highest clock, "
            "which under long products it lowers for the power's sake",
        ),
    ] = 0.0,
    stage_steps: Annotated[
        int,
        Parameter(
            group=_HOW, help="steps of the run without graphs that is split by part; 0: none"
        ),
    ] = 16,
    measure_ceilings: Annotated[
        bool,
        Parameter(
            group=_HOW,
            negative="",
            help="measure what the device can do at best, also where it is known",
        ),
    ] = False,
    seed: Annotated[int, Parameter(group=_HOW, help="of prompts and random weights")] = 0,
    out: Annotated[
        Path | None, Parameter(group=_HOW, help="write the record to this file too")
    ] = None,
    as_json: Annotated[
        bool, Parameter(name="--json", group=_HOW, negative="", help=RECORD_HELP)
    ] = False,
    device: Annotated[str, Parameter(group=_ENGINE, help="auto, cpu, cuda, cuda:N")] = "auto",
    dtype: Annotated[DType, Parameter(group=_ENGINE, help="weights and activations")] = "auto",
    batch_invariant: Annotated[
        bool | None,
        Parameter(
            group=_ENGINE,
            help="a row's bits do not depend on its company; default: on on a CPU, off on a GPU, where "
            "it takes longer",
        ),
    ] = None,
    threads: Annotated[
        int | None, Parameter(group=_ENGINE, help="CPU threads; default: the cores")
    ] = None,
    page_size: Annotated[int, Parameter(group=_ENGINE, help="tokens per KV page")] = 16,
    chunk_size: Annotated[
        int, Parameter(group=_ENGINE, help="prompt tokens computed per prefill step")
    ] = 2048,
) -> int:
    """Measure decode steps by drafter, sequences and context, each beside its floor.

    The floor is the least time by what the device can read and compute at best. Weights may be random:
    a step takes the same, and what is accepted can be said beforehand. A table goes to stderr, and one
    JSON record is the last line of stdout; a terminal shows it with --json only.
    """
    _check(
        ("steps", count, 1),
        ("repeats", repeats, 1),
        ("warmup", warmup, 1),
        ("stage-steps", stage_steps, 0),
        ("rest", rest, 0),
        *(("sequences", n, 1) for n in sequences or ()),
        *(("context", n, 1) for n in context or ()),
    )
    from paceline.bench import step_report
    from paceline.bench.step_cases import cases_of, parse_spec
    from paceline.bench.steps import Bench, Settings, run
    from paceline.bench.synthetic import rates_asked
    from paceline.cli.workbench import command_line, publish
    from paceline.core.device import TORCH_DTYPES

    rates = rates_asked(accept_length, accept_rates)
    specs = [parse_spec(text) for text in dict.fromkeys(spec or ["none"])]
    cases = cases_of(sequences or (), context or (), case or ())
    settings = Settings(
        steps=count,
        repeats=repeats,
        warmup=warmup,
        rest=rest,
        stage_steps=stage_steps,
        rates=rates,
        seed=seed,
    )
    config = EngineConfig(
        model=_model(model, random_weights=random_weights),
        device=device,
        dtype=dtype,
        weights="bf16",
        batch_invariant=batch_invariant,
        threads=threads,
        seed=seed,
        cache=CacheConfig(page_size=page_size, chunk_size=chunk_size),
    )
    bench = Bench(config, random_weights=seed if random_weights else None)
    found = _measure(bench, specs, cases, settings, run)
    dtype_used = TORCH_DTYPES[bench.config.dtype]
    hardware = _ceilings(bench.device, dtype_used, anew=measure_ceilings)
    rows = step_report.lines(found, bench.loaded.config, hardware, dtype_used.itemsize)
    warnings = [] if rates is None else [_SYNTHETIC]
    lame = sum(r.measured.without_graph + r.measured.captured for r in rows)
    warnings += [_NO_GRAPH.format(n=lame)] if lame else []
    impossible = sum(r.ms < 1e3 * r.floor.total for r in rows)
    warnings += [_TOO_FAST.format(n=impossible)] if impossible else []
    console = notes()
    console.print(step_report.table(rows))
    if stage_steps:
        console.print(step_report.parts_table(rows))
    for warning in warnings:
        console.print(f"note: {warning}")
    made = step_report.record(
        rows,
        settings,
        replace(bench.config, model=model),
        hardware,
        model=step_report.shape(bench.loaded, random_weights=random_weights),
        command=command_line(),
        notes=[*bench.loaded.notes, *warnings],
    )
    publish(made, out, as_json=as_json)
    return 0


def _measure(
    bench: Bench,
    specs: Sequence[Spec],
    cases: Sequence[Case],
    settings: Settings,
    run: Callable[[Bench, Spec, Sequence[Case], Settings, Callable[[], None]], list[Measured]],
) -> list[tuple[Spec, Sequence[Measured]]]:
    """Every drafter in turn, with a bar."""
    total = len(specs) * len(cases) * (2 if settings.stage_steps else 1)
    done = 0
    with progress("cases") as bar:
        bar(0, total)

        def step() -> None:
            nonlocal done
            done += 1
            bar(done, total)

        return [(spec, run(bench, spec, cases, settings, step)) for spec in specs]


def _ceilings(device: torch.device, dtype: torch.dtype, *, anew: bool) -> Hardware:
    from paceline.cost.hardware import measure, preset

    known = None if anew else preset(device)
    return measure(device, dtype) if known is None else known


def _model(name: str, *, random_weights: bool) -> str:
    """The model's name for the engine; with random weights the folder of its configuration."""
    from paceline.bench.step_cases import find_shape, shapes

    folder = find_shape(name)
    if folder is not None and (random_weights or name not in shapes()):
        return str(folder)
    if name in shapes():
        msg = (
            f"{name!r} is a shape, without weights; add --random-weights, or name a checkpoint's "
            "folder with --model"
        )
        raise ConfigError(msg)
    return name


def _check(*wanted: tuple[str, float, int]) -> None:
    problems = [f"--{name} {value} must be >= {low}" for name, value, low in wanted if value < low]
    if problems:
        msg = "invalid options: " + "; ".join(problems)
        raise ConfigError(msg)
