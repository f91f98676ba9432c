"""Tallies say what prometheus_client's own metrics would."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector

from paceline.api.server.tallies import Tallies, Total

ENDS = (0.001, 0.5, 1, 2560)
VALUES = (0.0, 0.001, 0.0011, 0.5, 0.75, 1, 2560.0, 2561.0, 1e9)
LABELS = {"model_name": "a", "engine": "0"}


def text(collector: Collector) -> list[str]:
    """Prometheus's format, without when something was made."""
    registry = CollectorRegistry()
    registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@pytest.mark.parametrize("values", [(), VALUES], ids=["nothing yet", "values on the ends"])
def test_a_histogram(values: Iterable[float]) -> None:
    """A value that is an end belongs to its bucket."""
    ours = Tallies("a_seconds", "What it is", LABELS, ENDS)
    theirs = Histogram("a_seconds", "What it is", list(LABELS), buckets=ENDS, registry=None)
    own = theirs.labels(**LABELS)
    for value in values:
        ours[None].observe(value)
        own.observe(value)
    assert text(ours) == text(theirs)


def test_a_histogram_for_each_label() -> None:
    """As many as were asked for, in that order."""
    ours = Tallies("a_seconds", "What it is", LABELS, ENDS, by="stage")
    theirs = Histogram("a_seconds", "What it is", [*LABELS, "stage"], buckets=ENDS, registry=None)
    assert len(text(ours)) == len(text(theirs)) == 2
    for stage in ("verify", "walk", "verify"):
        ours[stage].observe(0.1)
        theirs.labels(**LABELS, stage=stage).observe(0.1)
    assert text(ours) == text(theirs)


def test_a_counter() -> None:
    """Whole from the beginning."""
    ours = Total("tokens", "What it is", LABELS)
    theirs = Counter("tokens", "What it is", list(LABELS), registry=None)
    own = theirs.labels(**LABELS)
    assert text(ours) == text(theirs)
    ours.value += 3
    own.inc(3)
    assert text(ours) == text(theirs)
