"""Tallies: histograms and counters for what happens for every row of every step.

prometheus_client's own take a lock and a walk through the buckets for each value: ten times as long. A
tally has one writer, so nothing is locked; whoever reads while it is written may miss what came last.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Tally:
    """Values sorted into buckets.

    Args:
        ends: of the buckets, ascending; each belongs to its bucket. One without an end comes after them.
    """

    def __init__(self, ends: Sequence[float]) -> None:
        self._ends = tuple(ends)
        self._counts = [0] * (len(self._ends) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._ends, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Tell what was counted."""
        names = [*(str(float(end)) for end in self._ends), "+Inf"]
        buckets: list[tuple[str, float]] = []
        total = 0
        for name, count in zip(names, self._counts, strict=True):
            total += count
            buckets.append((name, total))
        family.add_metric(labels, buckets, self._sum)


class Tallies(Collector):
    """One histogram, of tallies that a last label tells apart.

    Args:
        name, text: the histogram's.
        labels: of every tally.
        ends: see `Tally`.
        by: the last label's name; None: there is one tally, and it has no other label.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Mapping[str, str],
        ends: Sequence[float],
        *,
        by: str | None = None,
    ) -> None:
        self._name, self._text, self._ends = name, text, ends
        self._names = [*labels, *((by,) if by is not None else ())]
        self._values = list(labels.values())
        self._tallies: dict[str | None, Tally] = {} if by is not None else {None: Tally(ends)}

    def __getitem__(self, label: str | None) -> Tally:
        """The tally with this last label, made where there is none; None: the one without."""
        found = self._tallies.get(label)
        if found is None:
            found = self._tallies[label] = Tally(self._ends)
        return found

    def collect(self) -> Iterable[Metric]:
        """Implement `Collector`."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._names)
        for label, tally in list(self._tallies.items()):
            tally.add_to(family, [*self._values, *((label,) if label is not None else ())])
        yield family


class Total(Collector):
    """A counter.

    Args:
        name, text: the counter's.
        labels: its own.

    Attributes:
        value: so far; whoever counts adds to it.
    """

    def __init__(self, name: str, text: str, labels: Mapping[str, str]) -> None:
        self._name, self._text, self._labels = name, text, dict(labels)
        self.value = 0

    def collect(self) -> Iterable[Metric]:
        """Implement `Collector`."""
        family = CounterMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), self.value)
        yield family
