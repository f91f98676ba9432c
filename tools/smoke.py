"""Tries an installed wheel: is everything in it, does it import, does its command answer.

Run it isolated, with the Python of an environment that holds the wheel and not the source tree:

    build/wheel-venv/bin/python -I tools/smoke.py
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "paceline"


def main() -> int:
    """Raise on the first thing that is wrong; print what was tried."""
    import paceline

    installed = Path(paceline.__file__).resolve().parent
    if (
        SOURCE in (installed, *installed.parents)
        or Path(sys.prefix).resolve() not in installed.parents
    ):
        print(f"paceline comes from {installed}, not from the environment {sys.prefix}")
        return 1
    if paceline.__version__ != metadata.version("paceline"):
        print(f"version {paceline.__version__} is published as {metadata.version('paceline')}")
        return 1
    source = {
        path.relative_to(SOURCE)
        for path in SOURCE.rglob("*")
        if path.is_file()
        and not any(p.startswith((".", "__py")) for p in path.relative_to(SOURCE).parts)
    }
    missing = sorted(str(path) for path in source if not (installed / path).is_file())
    if missing:
        print(f"not in the wheel: {', '.join(missing)}")
        return 1
    drafters = SOURCE.parents[1] / "drafters"
    lost = [
        p.name
        for p in drafters.rglob("*")
        if not (installed / p.relative_to(SOURCE.parents[1])).exists()
    ]
    if lost:
        print(f"drafters not in the wheel: {', '.join(sorted(lost))}")
        return 1
    for name in paceline.__all__:
        getattr(paceline, name)
    command = [str(Path(sys.prefix) / "bin" / "paceline"), "--help"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print(f"paceline {paceline.__version__}: {len(source)} files, public names, --help: good")
    return 0


if __name__ == "__main__":
    sys.exit(main())
