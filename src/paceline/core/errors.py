"""The package's exceptions.

Every message has three parts: what was asked, what is possible, what to do. `assert` is only for
our own bugs; whatever a user can cause raises one of these.
"""

from __future__ import annotations

_SHOWN = 200  # characters of a text that is quoted


class PacelineError(Exception):
    """Base of everything that a user of Paceline can cause and repair."""


class ConfigError(PacelineError, ValueError):
    """A configuration value, flag or environment that cannot be served."""


class RequestError(PacelineError, ValueError):
    """One request is malformed; other requests go on undisturbed."""


class ModelError(PacelineError):
    """A model's files are missing, damaged or of a kind that is not supported."""


class TemplateError(RequestError):
    """A chat template is missing, or raised while it was rendered."""


class MemoryBudgetError(ConfigError):
    """What was asked does not fit the memory budget; the message carries the numbers."""


class EngineStoppedError(PacelineError, RuntimeError):
    """The engine loop has ended (closed or failed) and takes no more requests."""


def quoted(value: object) -> str:
    """A value from outside as a message shows it; never made whole where it is large."""
    match value:
        case str():
            return repr(value if len(value) <= _SHOWN else value[: _SHOWN - 3] + "...")
        case list() | tuple() | set():
            return f"a list of {len(value)}"
        case dict():
            return f"an object of {len(value)} keys"
        case int() if abs(value) >= 10**50:
            return "a very large number"
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case _:
            return f"a {type(value).__name__}"
