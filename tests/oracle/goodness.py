"""Pearson's χ² test: do counts follow a law?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable


def chi2(seen: Iterable[object], law: dict[object, float], n: int) -> float:
    """Pearson's statistic of `seen` against `law`, in standard deviations from its mean.

    Cells that expect fewer than 5 are put together.
    """
    counts = Counter(seen)
    assert set(counts) <= set(law), "something impossible was emitted"
    cells = [(counts[c], p * n) for c, p in law.items() if p * n >= 5]
    rest = [(counts[c], p * n) for c, p in law.items() if p * n < 5]
    if rest:
        cells.append((sum(k for k, _ in rest), max(sum(e for _, e in rest), 1e-9)))
    stat = sum((k - e) ** 2 / e for k, e in cells)
    df = len(cells) - 1
    return (stat - df) / math.sqrt(2 * df)
