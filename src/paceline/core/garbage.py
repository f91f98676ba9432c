"""Keeps Python's garbage collector away from what was there before.

A full collection goes through every object that may be part of a cycle: with PyTorch and a model some two
hundred thousand, which takes about a tenth of a second. It comes once in some dozens of steps of many
rows, and the step in whose midst it comes takes that much longer: on a GPU, which by then has nothing
left to do, and for everybody whose text is streaming. Collections of young objects take microseconds.

It is the whole process's collector, so this is for programs of our own (the command line, benchmarks), not
for the library.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """For the time of the context look for garbage among the objects alone that are made within it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
