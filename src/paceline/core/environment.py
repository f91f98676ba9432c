"""Every environment variable that the package reads, in one place; README.md lists them.

They are for debugging and for machines that differ; whatever shapes a result is a config field. Each
is read when it is asked for, except where a caller says otherwise.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

# The package's own variables; CC, OMP_NUM_THREADS and OPENAI_API_KEY are others', and honoured.
VARIABLES = ("PACELINE_LOG", "PACELINE_LOG_OPS", "PACELINE_NATIVE", "PACELINE_CACHE")
_SERVE = "PACELINE_SERVE_"  # and a flag of `paceline serve`, in capitals


def log_level() -> int:
    """PACELINE_LOG: debug, info, warning (default; also for what is no level) or error."""
    asked = os.environ.get("PACELINE_LOG", "warning").upper()
    return logging.getLevelNamesMapping().get(asked, logging.WARNING)


def logs_ops() -> bool:
    """PACELINE_LOG_OPS=1: operators say what they are given, before they run."""
    return os.environ.get("PACELINE_LOG_OPS", "0") not in {"", "0"}


def allows_native() -> bool:
    """PACELINE_NATIVE=0 refuses our compiled CPU kernels, to look for a fault."""
    return os.environ.get("PACELINE_NATIVE") != "0"


def cache_path() -> Path:
    """PACELINE_CACHE: folder of converted models and compiled kernels; it may not exist yet.

    Raises:
        OSError: none is named, and the account has no home folder.
    """
    chosen = os.environ.get("PACELINE_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "paceline"
    except RuntimeError as error:
        raise OSError(str(error)) from error


def c_compiler() -> str | None:
    """CC: the command of a C compiler."""
    return os.environ.get("CC") or None


def openmp_threads() -> int | None:
    """OMP_NUM_THREADS, the usual way to ask for fewer threads than there are cores."""
    stated = os.environ.get("OMP_NUM_THREADS", "")
    return int(stated) if stated.isdecimal() and int(stated) > 0 else None


def openai_key() -> str | None:
    """OPENAI_API_KEY: the key that clients of OpenAI-compatible servers send by default."""
    return os.environ.get("OPENAI_API_KEY") or None


def serve_variable(name: str) -> str:
    """PACELINE_SERVE_<NAME>: stands in for a flag of `paceline serve`; the command line reads it."""
    return _SERVE + name.upper()


def serve_variables() -> tuple[str, ...]:
    """The variables of that kind that are set."""
    return tuple(sorted(name for name in os.environ if name.startswith(_SERVE)))
