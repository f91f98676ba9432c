"""A picture of a bench record: accept length and speed ratio by group, one bar per drafter.

Needs matplotlib (the extra `plots`). Draws from the record alone, so old records can be drawn too.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError

_SUFFIXES = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Refuse before a long run what could not be drawn after it.

    Raises:
        ConfigError: matplotlib is missing, or the file's kind is unknown.
    """
    if path.suffix not in _SUFFIXES:
        msg = f"cannot draw {path.name!r}; possible are {', '.join(_SUFFIXES)}: rename the file"
        raise ConfigError(msg)
    if importlib.util.find_spec("matplotlib") is None:
        msg = (
            "a plot was asked for, but matplotlib is not installed; the table and the record need "
            "none; to get it: pip install 'paceline[plots]'"
        )
        raise ConfigError(msg)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw a bench record into a file.

    Args:
        record: what `report.record` made.
        path: a .png, .svg or .pdf file.

    Raises:
        ConfigError: see `check`.
    """
    check(path)
    figure_module = importlib.import_module("matplotlib.figure")
    results = record["results"]
    groups = [g["group"] for g in results[0]["groups"]]
    figure = figure_module.Figure(figsize=(max(6.0, 1.2 * len(groups)), 7.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    width = 0.8 / len(results)
    for i, result in enumerate(results):
        places = [g + (i - (len(results) - 1) / 2) * width for g in range(len(groups))]
        upper.bar(
            places, [g["accept_length"] for g in result["groups"]], width, label=result["spec"]
        )
        lower.bar(places, [g["speed_ratio"] for g in result["groups"]], width)
    upper.set_ylabel("accept length (bonus included)")
    lower.set_ylabel("speed, times undrafted")
    for axes in (upper, lower):
        axes.axhline(1.0, color="black", linewidth=0.8)
    lower.set_xticks(range(len(groups)), groups, rotation=30, ha="right")
    upper.legend()
    temperature = record["settings"]["temperature"]
    figure.suptitle(f"{record['config']['model']}, temperature {temperature:g}")
    figure.savefig(path)
