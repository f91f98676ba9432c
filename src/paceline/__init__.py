"""Paceline: an inference engine in which lossless speculative decoding is the normal way to decode.

The public names, and nothing else. They are imported when first used, so that `import paceline`
costs no torch import (`paceline --help` and editors stay quick).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.api.llm import LLM
    from paceline.core.config import EngineConfig
    from paceline.core.request import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "paceline.api.llm",
    "EngineConfig": "paceline.core.config",
    "SamplingParams": "paceline.core.request",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        msg = f"module 'paceline' has no attribute {name!r}; public names: {', '.join(__all__)}"
        raise AttributeError(msg)
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, imported or not."""
    return sorted({*globals(), *__all__})
