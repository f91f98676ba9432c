"""The drafter check: table and record of what `paceline.draft.selftest` found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from paceline.bench.report import header
from paceline.models.cache import folder_digest

if TYPE_CHECKING:
    from paceline.bench.machine import Json
    from paceline.core.config import DraftConfig, EngineConfig
    from paceline.draft.selftest import Report

SCHEMA = "paceline-drafter/1"


def table(report: Report) -> Table:
    """Every reading's accept length and agreement by position."""
    widest = max(len(trial.by_position) for trial in report.trials)
    shown = Table(
        title="what the drafter says where the target's own text is known: share of right drafts",
        title_justify="left",
    )
    shown.add_column("read")
    shown.add_column("accept length", justify="right")
    for position in range(1, widest + 1):
        shown.add_column(f"draft {position}" if position == 1 else str(position), justify="right")
    for trial in report.trials:
        cells = [f"{share:.0%}" for share in trial.by_position]
        shown.add_row(trial.reading.name, f"{trial.accept_length:.2f}", *cells)
    return shown


def record(
    report: Report | None,
    problem: str | None,
    draft: DraftConfig,
    config: EngineConfig,
    *,
    tokenizer: str | None,
    command: Sequence[str],
) -> dict[str, Json]:
    """The record of a check.

    Args:
        report: None if the drafter could not be loaded.
        problem: why it could not.
        draft: the drafter's resolved config.
        config: the target's.
        tokenizer: how the drafter's tokenizer differs from the target's; None if it is not known to.
        command: how this was started.
    """
    shown: dict[str, Json] = {
        **header(SCHEMA, command, config),
        "drafter": {"method": draft.method, **_identity(draft)},
        "fits": report is not None and report.outcome == "fits" and tokenizer is None,
        "outcome": "refused" if report is None else report.outcome,
        "advice": problem if report is None else report.advice,
        "tokenizer": tokenizer,
    }
    if report is None:
        return shown
    found = report.vocabulary
    return shown | {
        "findings": [{"level": f.level, "text": f.text} for f in report.findings],
        "vocabulary": None
        if found is None
        else {
            "coverage": round(found.coverage, 4),
            "right": round(found.right, 4),
            "right_as_read": round(found.right_as_read, 4),
            "num_heard": found.num_heard,
            "num_agreeing": found.num_agreeing,
        },
        "trials": [
            {
                "reading": trial.reading.name,
                "taps": list(trial.reading.taps),
                "num_places": trial.num_places,
                "accept_length": round(trial.accept_length, 4),
                "by_position": [round(share, 4) for share in trial.by_position],
            }
            for trial in report.trials
        ],
    }


def _identity(draft: DraftConfig) -> dict[str, Json]:
    """Which drafter: its folder's name and digest. Where it lies is nobody's business but its owner's."""
    if draft.model is None:
        return {"name": None, "digest": None}
    folder = Path(draft.model).expanduser().resolve()
    try:
        return {"name": folder.name, "digest": folder_digest(folder)}
    except OSError:
        return {"name": folder.name, "digest": None}
