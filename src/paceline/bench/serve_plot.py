"""A picture of a server bench: output tokens a second against the load, and per user against the sum.

Draws from records alone. Several records make one picture: a server without drafts beside the same
one with them, say. Needs matplotlib (the extra `plots`).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.bench import plot
from paceline.bench.serve_report import SCHEMA
from paceline.core.errors import ConfigError


def read(path: Path) -> Mapping[str, Any]:
    """An earlier record, for the same picture.

    Raises:
        ConfigError: it cannot be read, or is none of a server bench.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        msg = f"cannot read the record {path}: {error}; give a file that --out wrote"
        raise ConfigError(msg) from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        msg = f"{path} is no record of a server bench ({SCHEMA}); give a file that --out wrote"
        raise ConfigError(msg)
    return found


def draw(records: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw records into a file.

    Args:
        records: name -> record, as `serve_report.record` makes them.
        path: a .png, .svg or .pdf file.

    Raises:
        ConfigError: see `plot.check`.
    """
    plot.check(path)
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(10.0, 4.5), layout="constrained"
    )
    left, right = figure.subplots(1, 2)
    several = len(records) > 1
    rates = False
    ticks: set[float] = set()
    for name, record in records.items():
        for variant, rows in _lines(record["summary"]).items():
            legend = ", ".join(word for word in (name if several else "", variant) if word)
            loads, speeds = zip(
                *((_load(row), row["output_throughput"]) for row in rows), strict=True
            )
            ticks |= set(loads)
            left.plot(loads, speeds, marker="o", label=legend or record["server"]["model"])
            users = [
                (1e3 / r["p50_tpot_ms"], r["output_throughput"]) for r in rows if r["p50_tpot_ms"]
            ]
            if users:
                right.plot(*zip(*users, strict=True), marker="o")
            rates |= rows[0]["max_concurrency"] is None
    left.set_xlabel("requests a second" if rates else "requests at a time")
    left.set_xticks(sorted(ticks), [f"{load:g}" for load in sorted(ticks)])
    left.set_ylabel("output tokens a second")
    left.set_ylim(bottom=0)
    if left.lines:
        left.legend()
    right.set_xlabel("tokens a second of one user (1 / median TPOT)")
    right.set_ylabel("output tokens a second")
    right.set_ylim(bottom=0)
    last = list(records.values())[-1]
    figure.suptitle(f"{last['server']['model']}, temperature {last['settings']['temperature']:g}")
    figure.savefig(path)


def _lines(summary: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows by variant, by load; without those whose tokens nobody counted."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in summary:
        if row["output_throughput"] is not None and _load(row) is not None:
            found.setdefault(row["variant"], []).append(row)
    return {variant: sorted(rows, key=_load) for variant, rows in found.items()}


def _load(row: Mapping[str, Any]) -> Any:
    rate = row["request_rate"]
    return row["max_concurrency"] or (rate if rate != "inf" else None)
