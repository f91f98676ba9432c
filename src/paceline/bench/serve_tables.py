"""Tables of server benches, from their records and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from rich.table import Table

from paceline.bench.serve_client import Answer
from paceline.bench.serve_run import ServeReport
from paceline.bench.serve_summary import METRICS, PERCENTILES, Json, accept_length

_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "chunk gap", "e2el": "E2E"}


def throughput_table(rows: Sequence[Mapping[str, Json]]) -> Table:
    """What was made, a row per variant and load."""
    shown = Table(title="throughput and acceptance, medians over repeats", title_justify="left")
    variants = len({row["variant"] for row in rows}) > 1
    spread = any(row["spread"] is not None for row in rows)
    goodput = any("request_goodput" in row for row in rows)
    _begin(shown, rows)
    heads = ["done", "failed", "req/s", "output tok/s"] + ["spread"] * spread
    heads += ["times first"] * variants + ["good/s"] * goodput + ["accept length"]
    for head in heads:
        shown.add_column(head, justify="right")
    for row in rows:
        cells = [*_place(row, rows), str(row["completed"]), str(row["failed"])]
        cells += [_cell(row["request_throughput"], 2), _cell(row["output_throughput"], 1)]
        cells += [_cell(row["spread"], 2)] * spread
        cells += [_cell(row["over_first_variant"], 2)] * variants
        cells += [_cell(row.get("request_goodput"), 2)] * goodput
        shown.add_row(*cells, _cell(row["acceptance_length"], 2))
    return shown


def latency_table(rows: Sequence[Mapping[str, Json]]) -> Table:
    """What users waited for, a row per variant and load."""
    shown = Table(title="milliseconds: p50 / p99, medians over repeats", title_justify="left")
    _begin(shown, rows)
    for metric in METRICS:
        shown.add_column(_NAMES[metric], justify="right")
    for row in rows:
        pairs = ((row[f"p50_{m}_ms"], row[f"p99_{m}_ms"]) for m in METRICS)
        shown.add_row(*_place(row, rows), *(f"{_ms(low)} / {_ms(high)}" for low, high in pairs))
    return shown


def _begin(shown: Table, rows: Sequence[Mapping[str, Json]]) -> None:
    """The columns that say which row it is."""
    if len({row["variant"] for row in rows}) > 1:
        shown.add_column("variant", overflow="fold")
    shown.add_column(
        "at once" if rows[0]["max_concurrency"] is not None else "sent/s", justify="right"
    )


def _place(row: Mapping[str, Json], rows: Sequence[Mapping[str, Json]]) -> list[str]:
    load = row["request_rate"] if row["max_concurrency"] is None else row["max_concurrency"]
    shown = f"{load:g}" if isinstance(load, float) else str(load)
    return [str(row["variant"])] * (len({r["variant"] for r in rows}) > 1) + [shown]


def groups_table(report: ServeReport) -> Table | None:
    """Accept length by group of prompts, a column per variant; None where answers do not tell it.

    Under the first load only: a server may draft less the more it has to do.
    """
    answers: dict[tuple[str, str], list[Answer]] = {}
    runs = [run for run in report.runs if run.load == report.runs[0].load]
    for run in runs:
        for call, answer in zip(run.calls, run.measured.answers, strict=True):
            if answer.failure is None:
                answers.setdefault((call.group, run.variant), []).append(answer)
    variants = list(dict.fromkeys(run.variant for run in runs))
    groups = list(dict.fromkeys(group for group, _ in answers))
    lengths = {place: accept_length(pile) for place, pile in answers.items()}
    if len(groups) < 2 or not any(lengths.values()):
        return None
    title = f"accept length (bonus included) by the answers, {runs[0].load}"
    shown = Table(title=title, title_justify="left")
    shown.add_column("group")
    for variant in variants:
        shown.add_column(variant or "accept length", justify="right")
    for group in groups:
        shown.add_row(group, *(_cell(lengths.get((group, v)), 2) for v in variants))
    return shown


def details(result: Mapping[str, Json]) -> Table:
    """One run's distributions: a row per metric."""
    shown = Table(title="milliseconds", title_justify="left")
    names = ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES if p != 50))
    shown.add_column("")
    for name in names:
        shown.add_column(name, justify="right")
    for m in METRICS:
        shown.add_row(_NAMES[m], *(_cell(result[f"{name}_{m}_ms"], 2) for name in names))
    return shown


def failure_lines(results: Sequence[Mapping[str, Json]]) -> list[str]:
    """Failures of all runs by kind, each with what was said."""
    counts: dict[str, int] = {}
    said: dict[str, dict[str, None]] = {}
    for result in results:
        for kind, found in cast("dict[str, dict[str, Json]]", result["failures"]).items():
            counts[kind] = counts.get(kind, 0) + cast("int", found["count"])
            said.setdefault(kind, {}).update(dict.fromkeys(cast("list[str]", found["messages"])))
    return [f"{counts[kind]} failed, {kind}: {'; '.join(list(said[kind])[:3])}" for kind in counts]


def _cell(value: Json, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"


def _ms(value: Json) -> str:
    """Three digits, as far as there are that many."""
    return _cell(value, 0 if isinstance(value, int | float) and value >= 100 else 1)
