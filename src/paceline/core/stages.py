"""`stage(name)`: marks a part of a step for whoever measures; free when nobody listens.

The engine wraps each line of a step in `with stages("verify"):`. A profiler passes its own
`Stages`; the default is a null context, so no `if profile:` stands in the loop.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

_NULL: AbstractContextManager[None] = nullcontext()


class Stages(Protocol):
    """Anything that can be asked for a context around a named part of a step."""

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Return a context that is open while the part `name` runs."""
        ...


def silent(name: str) -> AbstractContextManager[None]:  # noqa: ARG001 (the protocol's argument)
    """The default `Stages`: measures nothing."""
    return _NULL
