"""The command line. This module only finds the way there, so that it costs nothing to import."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run `paceline` with these arguments (default: the process's) and return the exit code."""
    try:
        from paceline.cli.app import run

        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # while modules are imported, or the last words are written
        if sys.stderr is not None:
            sys.stderr.write("paceline: interrupted\n")
        return 130
