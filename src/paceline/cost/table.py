"""StepCosts: how long a step of so many rows and tokens takes, learned from the steps themselves.

Only ratios decide how many nodes to verify, while absolute times drift: contexts grow, machines get
busy. So a step's time is

    seconds(tokens) = e^level x (1 + scale x (prior(tokens) / prior(1) - 1)) x e^deviation(tokens)

where the prior is a quick calibration's curve. `level` follows drift within a few steps, `scale`
says how much dearer more tokens are here than the calibration said, so that few sizes teach about
all; both are tracked together by a Kalman filter per class of rows. A slowly learned deviation per
number of tokens holds what is left: tiles, cache edges. An outlier (a page fault, a neighbour) moves
nothing by more than three usual deviations. What is read is made monotone: more tokens never cost
less.

Not here: what is decided from it (`policy.py`).
"""

from __future__ import annotations

import json
import logging
import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_EXACT = 16  # token counts up to here have a class of their own
_PER_OCTAVE = 4  # classes per doubling beyond
_PRIOR = ((1, 1, 0.010), (1, 16, 0.016))  # of no machine; only until measured
_LEVEL_DRIFT, _SCALE_DRIFT = 0.03**2, 0.01**2  # variance gained per step
_LEVEL_DOUBT, _SCALE_DOUBT = 1.0, 4.0  # variance at first
_LEAST_SCALE = 0.02
_LEAST_RISE = 0.001  # per token: a flat prior can still be scaled
_LEAST_GAIN = 0.02  # of a deviation, however often measured
_FORMAT = 1


@dataclass(slots=True)
class _Trend:
    """Level and scale of one class of rows, with their covariance."""

    level: float  # log seconds of one token
    scale: float
    doubt: float = _LEVEL_DOUBT
    scale_doubt: float = _SCALE_DOUBT
    cross: float = 0.0

    def growth(self, rise: float) -> float:
        """Log of time over that of one token, where the prior is dearer by the share `rise`."""
        return math.log1p(self.scale * rise)

    def update(self, rise: float, residual: float, noise: float) -> None:
        """One step of an extended Kalman filter; `noise` is the variance of a measurement."""
        slope = rise / (1.0 + self.scale * rise)  # d growth / d scale
        self.doubt += _LEVEL_DRIFT
        self.scale_doubt += _SCALE_DRIFT
        by_level = self.doubt + slope * self.cross
        by_scale = self.cross + slope * self.scale_doubt
        total = by_level + slope * by_scale + noise
        self.level += by_level / total * residual
        self.scale = max(_LEAST_SCALE, self.scale + by_scale / total * residual)
        self.doubt -= by_level * by_level / total
        self.cross -= by_level * by_scale / total
        self.scale_doubt -= by_scale * by_scale / total


@dataclass(slots=True)
class _Mean:
    """A running mean that starts at 0 with the weight of three measurements, and never freezes."""

    value: float = 0.0
    seen: float = 0.0

    def move(self, residual: float) -> None:
        self.seen += 1
        self.value += max(_LEAST_GAIN, 1.0 / (self.seen + 3)) * residual


class StepCosts:
    """Seconds per step by (rows, tokens); tokens are rows + verified draft nodes.

    Args:
        prior: (rows, tokens, seconds) of a quick calibration, in any order; None: a guess.
    """

    def __init__(self, prior: Iterable[tuple[int, int, float]] | None = None) -> None:
        points = [(r, t, s) for r, t, s in (prior or ()) if r >= 1 and t >= 1 and s > 0]
        self._prior: dict[int, tuple[list[float], list[float]]] = {}  # rows -> tokens, seconds
        for rows, tokens, seconds in sorted(points or _PRIOR):
            knots, times = self._prior.setdefault(rows, ([], []))
            if not knots or knots[-1] < tokens:
                knots.append(float(tokens))
                times.append(seconds)
        self._trends: dict[int, _Trend] = {}  # by class of rows
        self._deviations: dict[int, _Mean] = {}  # by class of tokens
        self._spread = 0.2  # usual |residual|
        self._curves: dict[tuple[int, int], list[float]] = {}

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn from a step. Times that are not positive and finite are ignored."""
        if not (0.0 < seconds < math.inf) or not 1 <= rows <= tokens:
            return
        self._curves.clear()
        row_class = _row_class(rows)
        rise = self._rise(rows, tokens)
        trend = self._trends.get(row_class)
        if trend is None:
            near = self._nearest(row_class)
            trend = _Trend(math.log(seconds), 1.0 if near is None else near.scale)
            trend.level -= trend.growth(rise)
            self._trends[row_class] = trend
        deviation = _between(self._deviations, _token_class(tokens))
        residual = math.log(seconds) - trend.level - trend.growth(rise) - deviation
        bound = max(0.03, 3.0 * self._spread)
        self._spread += 0.05 * (min(abs(residual), bound) - self._spread)
        residual = min(bound, max(-bound, residual))
        trend.update(rise, residual, (1.25 * self._spread) ** 2 + 1e-6)
        self._deviations.setdefault(_token_class(tokens), _Mean()).move(residual)

    def seconds(self, rows: int, tokens: int) -> float:
        """Expected time of a step; monotone in `tokens` within a number of rows."""
        return self.curve(rows, max(0, tokens - rows))[-1]

    def curve(self, rows: int, most: int) -> Sequence[float]:
        """Expected times of steps with `rows` rows and 0, 1, ... `most` draft nodes."""
        known = self._curves.get((rows, most))
        if known is None:
            known = self._make_curve(rows, most)
            self._curves[rows, most] = known
        return known

    def _make_curve(self, rows: int, most: int) -> list[float]:
        row_class = _row_class(rows)
        trend = self._trends.get(row_class) or self._nearest(row_class)
        if trend is None:
            trend = _Trend(math.log(self._prior_seconds(rows, 1)), 1.0)
        classes = range(_token_class(rows), _token_class(rows + most) + 1)
        knots = [max(float(rows), _tokens_of(c)) for c in classes]
        logs = [
            trend.level + trend.growth(self._rise(rows, knot)) + _between(self._deviations, c)
            for knot, c in zip(knots, classes, strict=True)
        ]
        weights = [
            1.0 + (self._deviations[c].seen if c in self._deviations else 0) for c in classes
        ]
        times = monotone([math.exp(value) for value in logs], weights)
        curve = []
        i = 0
        for tokens in range(rows, rows + most + 1):
            while i < len(knots) - 2 and knots[i + 1] <= tokens:
                i += 1
            curve.append(_on_piece(knots, times, i, tokens))
        return curve

    def _nearest(self, row_class: int) -> _Trend | None:
        near = min(self._trends, key=lambda c: abs(c - row_class), default=None)
        return None if near is None else self._trends[near]

    def _rise(self, rows: int, tokens: float) -> float:
        """Share by which the prior says that `tokens` cost more than one."""
        share = self._prior_seconds(rows, tokens) / self._prior_seconds(rows, 1) - 1.0
        return max(share, _LEAST_RISE * (tokens - 1.0))

    def _prior_seconds(self, rows: int, tokens: float) -> float:
        nearest = min(self._prior, key=lambda r: abs(math.log(r / rows)))
        knots, times = self._prior[nearest]
        i = min(max(bisect_right(knots, tokens) - 1, 0), max(0, len(knots) - 2))
        return max(times[0] / 2, _on_piece(knots, times, i, tokens))

    # ------------------------------------------------------------------------- keeping

    def save(self, path: Path, key: str) -> None:
        """Write what was learned, atomically. `key` names machine, model and settings."""
        state = {
            "format": _FORMAT,
            "key": key,
            "prior": [
                (rows, t, s)
                for rows, (knots, times) in self._prior.items()
                for t, s in zip(knots, times, strict=True)
            ],
            "spread": self._spread,
            "trends": [(c, *astuple(t)) for c, t in self._trends.items()],
            "deviations": [(c, *astuple(m)) for c, m in self._deviations.items()],
        }
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(state), encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path, key: str) -> StepCosts | None:
        """Read what `save` wrote; None if there is none, it is damaged, or of another key."""
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            if state["format"] != _FORMAT or state["key"] != key:
                return None
            costs = cls([(int(r), int(t), float(s)) for r, t, s in state["prior"]])
            costs._spread = float(state["spread"])
            costs._trends = {int(c): _Trend(*map(float, v)) for c, *v in state["trends"]}
            costs._deviations = {int(c): _Mean(*map(float, v)) for c, *v in state["deviations"]}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("step costs in %s cannot be read (%s); measuring anew", path, error)
            return None
        return costs


def monotone(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The closest non-decreasing values (least squares; pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        mean, total, many = value, weight, 1
        while pools and pools[-1][0] > mean:
            before, other, count = pools.pop()
            mean = (mean * total + before * other) / (total + other)
            total += other
            many += count
        pools.append((mean, total, many))
    return [mean for mean, _, many in pools for _ in range(many)]


def _row_class(rows: int) -> int:
    return (rows - 1).bit_length()


def _token_class(tokens: int) -> int:
    if tokens <= _EXACT:
        return tokens
    return _EXACT + round(_PER_OCTAVE * math.log2(tokens / _EXACT))


def _tokens_of(token_class: int) -> float:
    if token_class <= _EXACT:
        return float(token_class)
    return float(_EXACT * 2.0 ** ((token_class - _EXACT) / _PER_OCTAVE))


def _on_piece(knots: Sequence[float], values: Sequence[float], i: int, at: float) -> float:
    """The value at `at` on the line through knots i and i + 1; never falling past the last knot."""
    if len(knots) == 1:
        return values[0]
    slope = (values[i + 1] - values[i]) / (knots[i + 1] - knots[i])
    if at > knots[-1] and slope < 0.0:
        return values[-1]
    return values[i] + slope * (at - knots[i])


def _between(means: dict[int, _Mean], at: int) -> float:
    """The mean of class `at`, or between those of the nearest measured classes."""
    here = means.get(at)
    if here is not None and here.seen:
        return here.value
    known = sorted(c for c, m in means.items() if m.seen)
    if not known:
        return 0.0
    i = bisect_left(known, at)
    if i in (0, len(known)):
        return means[known[0] if i == 0 else known[-1]].value
    low, high = known[i - 1], known[i]
    share = (at - low) / (high - low)
    return means[low].value * (1.0 - share) + means[high].value * share
