"""Where benchmark records and pages lie, for tests that compare them; no tests here."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def text(page: str) -> str:
    """A page of the repository, with one space where there is any."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())
