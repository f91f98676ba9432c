"""Garbage is looked for among new objects alone."""

from __future__ import annotations

import gc
import weakref

from paceline.core.garbage import only_new_garbage


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


def test_old_objects_are_left_alone_and_new_ones_are_not() -> None:
    """A cycle made within the context goes, one from before stays until it has ended."""
    old = Knot()
    seen_old = weakref.ref(old)
    with only_new_garbage():
        frozen = gc.get_freeze_count()
        assert frozen > 1000
        new = Knot()
        seen_new = weakref.ref(new)
        del old, new
        gc.collect()
        assert seen_new() is None
        assert seen_old() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert seen_old() is None
