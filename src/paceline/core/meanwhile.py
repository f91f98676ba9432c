"""`meanwhile`: what a step calls at the moment from which it leaves Python to other threads for longest.

One thread at a time runs Python, and a step's thread gives it away whenever it calls into PyTorch. If
others are woken between two steps they take Python at the first such call, and the step waits until all
of them are through. Woken right before the target's long native call (or once a GPU computes), they have
it for themselves and nobody waits. Where the layers are many calls there is no such moment; it is called
before them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

# Called at most once a step, on the step's thread; neither raises nor touches the engine.
Meanwhile: TypeAlias = Callable[[], object]


def nothing() -> None:
    """The default: nobody waits for the moment."""
