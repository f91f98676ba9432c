"""A pytest plugin for CI: a test that skips has failed, unless what it lacks is a GPU.

A skipped test protects nothing, and a missing package is easily overlooked. On a developer's machine
skips are fine; with PACELINE_CI=1 every skip, of a test or of a whole module, counts as a failure,
except where the reason names a GPU.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    Reports = Generator[None, pytest.TestReport, pytest.TestReport]
    CollectReports = Generator[None, pytest.CollectReport, pytest.CollectReport]

_GPU = re.compile(r"\bGPU\b")


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip without a GPU in its reason into a failure."""
    if not report.skipped or hasattr(report, "wasxfail") or os.environ.get("PACELINE_CI") != "1":
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if _GPU.search(reason):
        return
    report.outcome = "failed"
    report.longrepr = (
        f"{reason}\n{report.nodeid} was skipped; with PACELINE_CI=1 only a missing GPU may skip a "
        "test. Install what it lacks in .ci/run, or mend the test."
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Reports:
    """Skips of one test: marks, pytest.skip(), importorskip inside a test."""
    report = yield
    _refuse(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> CollectReports:
    """Skips of a whole module: importorskip at its top."""
    report = yield
    _refuse(report)
    return report
