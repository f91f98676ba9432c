"""Makes Triton's interpreter faster, without changing what it computes.

It replaces the functions of `triton.language` by its own whenever a kernel starts, and again, by walking
through the whole module, whenever a kernel calls another function: two fifths of the time of these tests.
Within one launch once is enough.
"""

from __future__ import annotations

import inspect
from typing import Any

from triton.runtime import interpreter


class _Once:
    """Stands in for `interpreter._patch_lang`; remembers what is replaced until the launch ends."""

    def __init__(self) -> None:
        self._patch = interpreter._patch_lang
        self._seen: set[int] = set()
        self._launch: Any = None

    def __call__(self, fn: Any) -> Any:
        """Replace what `fn` sees of Triton, unless the launch it belongs to has done so."""
        seen = {id(value) for value in fn.__globals__.values() if inspect.ismodule(value)}
        seen &= {id(interpreter.tl), id(interpreter.tl.core)}
        if self._launch is not None and seen <= self._seen:
            return None  # a call within a launch: nobody restores it
        scope = self._patch(fn)
        self._seen |= seen
        if self._launch is None:
            self._launch, restore = scope, scope.restore

            def restored() -> None:
                restore()
                self._launch = None
                self._seen.clear()

            scope.restore = restored
        return scope


# Of other versions of Triton the interpreter stays as it is.
if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
    interpreter._patch_lang = _Once()
