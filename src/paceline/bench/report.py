"""Records and tables of bench runs. Makes them; printing is the command line's.

A record is one JSON object that says what was measured, on what, with what, and every raw time, so
that a figure can be checked years later. Keys are stable; `schema` changes when a meaning does.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from rich.table import Table

from paceline.bench.machine import Json, machine, source, versions
from paceline.bench.summary import ALL, differences, summarise

if TYPE_CHECKING:
    from paceline.bench.run import Settings, Slice, Task
    from paceline.bench.workload import Workload
    from paceline.core.config import EngineConfig

SCHEMA = "paceline-bench/1"
_MAX_DIFFERENCES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecRun:
    """One drafter's run."""

    spec: str  # as it was asked for
    config: EngineConfig  # resolved
    notes: tuple[str, ...]
    tasks: Sequence[Task]
    slices: Sequence[Slice]


def record(
    runs: Sequence[SpecRun],
    workload: Workload,
    settings: Settings,
    *,
    command: Sequence[str],
    warnings: Sequence[str] = (),
) -> dict[str, Json]:
    """The record of a bench: one entry in `results` per drafter."""
    return {
        **header(SCHEMA, command, runs[0].config),
        "workload": describe(workload),
        "settings": _plain(asdict(settings)),
        "conventions": {
            "accept_length": "emitted tokens per verify step, bonus included, token-weighted",
            "speed_ratio": "output tokens per second over the same engine without drafts",
        },
        "warnings": list(warnings),
        "results": [_result(run) for run in runs],
    }


def header(schema: str, command: Sequence[str], config: EngineConfig) -> dict[str, Json]:
    """What every kind of record begins with: when, from which source, on what, with what."""
    shown = asdict(config)
    del shown["draft"]  # each drafter's own is with its results
    return {
        "schema": schema,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": list(command),
        **source(),
        "versions": versions(),
        "machine": machine(torch.device(config.device)),
        "config": _plain(shown),
    }


def describe(workload: Workload) -> Json:
    """Which prompts: file names, a digest of the prompts, how many in which group."""
    counts = {g: sum(p.group == g for p in workload.prompts) for g in workload.groups}
    return {
        "files": list(workload.sources),
        "digest": workload.digest,
        "groups": dict(counts),
        "num_prompts": len(workload.prompts),
    }


def _result(run: SpecRun) -> Json:
    wrong = differences(run.slices)
    return {
        "spec": run.spec,
        "draft": _plain(asdict(run.config.draft)),
        "notes": list(run.notes),
        "groups": [_plain(asdict(g)) for g in summarise(run.slices, run.tasks)],
        "differences": [
            {"prompt": run.tasks[d.task].key, "repeat": d.repeat, "first_token": d.index}
            for d in wrong[:_MAX_DIFFERENCES]
        ],
        "num_different": len(wrong),
        "raw": [
            {
                "prompts": [run.tasks[i].key for i in piece.tasks],
                "repeat": piece.repeat,
                "way": piece.way,
                "seconds": round(piece.seconds, 6),
                "tokens": [len(s.token_ids) for s in piece.samples],
                "steps": [s.stats.num_steps for s in piece.samples],
                "decode_s": [round(s.stats.decode_s, 6) for s in piece.samples],
            }
            for piece in run.slices
        ],
    }


def _plain(value: object) -> Json:
    """Tuples become lists, floats are rounded to what was measured."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return round(value, 6)
    assert value is None or isinstance(value, str | int), f"no JSON value: {value!r}"
    return value


def table(runs: Sequence[SpecRun]) -> Table:
    """Accept length and speed ratio by group, one column per drafter; then speeds and equality."""
    summaries = [{g.group: g for g in summarise(run.slices, run.tasks)} for run in runs]
    shown = Table(
        title="accept length (bonus included), speed against the same engine without drafts",
        title_justify="left",
    )
    shown.add_column("group")
    shown.add_column("prompts", justify="right")
    for run in runs:
        shown.add_column(run.spec, justify="right")
    for group, first in summaries[0].items():
        if group == ALL:
            shown.add_section()
        cells = [f"{s[group].accept_length:.2f}  {s[group].speed_ratio:.2f}x" for s in summaries]
        shown.add_row(group, str(first.num_prompts), *cells)
    shown.add_section()
    whole = [found[ALL] for found in summaries]
    shown.add_row("tokens/s", "", *(f"{w.tokens_per_second:.1f}" for w in whole))
    shown.add_row("without drafts", "", *(f"{w.baseline_tokens_per_second:.1f}" for w in whole))
    shown.add_row("equal outputs", "", *(f"{w.num_equal}/{w.num_compared}" for w in whole))
    return shown
