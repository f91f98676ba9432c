"""The package's exceptions.

Every message has three parts: what was asked, what is possible, what to do. `assert` is only for
our own bugs; whatever a user can cause raises one of these.
"""

from __future__ import annotations


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
