"""The small launches in Triton's interpreter; run by tests/unit/ops/test_triton_small.py.

Needs TRITON_INTERPRET=1 before Triton is imported, hence a process of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import triton

from tests.small_launches import PARTS, kernels
from tools import sanitize


def test_the_interpreter_is_on() -> None:
    """Without it nothing here would run on a CPU."""
    assert triton.knobs.runtime.interpret


def test_every_part_is_watched() -> None:
    """Names that have to be the same in both files."""
    assert tuple(PARTS) == sanitize.PARTS


def test_no_kernel_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tools watch on a GPU is all that there is."""
    every = kernels()
    launched: set[int] = set()
    kind = type(next(iter(every.values())))
    before = kind.__getitem__

    def noted(self: Any, grid: Any) -> Any:
        launched.add(id(self))
        return before(self, grid)

    monkeypatch.setattr(kind, "__getitem__", noted)
    for part in PARTS.values():
        part("cpu")
    assert [name for name, kernel in every.items() if id(kernel) not in launched] == []
    assert len(every) > 20
