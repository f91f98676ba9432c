"""The size table: lines by folder, the difference to an earlier commit, and the files over budget.

A file has a soft limit of 300 lines, where it is time to think, and a hard limit of 400, where this
script fails. Limits keep a file on a few screens; they are not a score to be golfed.

    python tools/sizes.py [--base COMMIT]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "tools", "benchmarks", "examples")
SUFFIXES = (".py", ".c", ".h", ".sh", ".js", ".css", ".html")
SOFT = 300
HARD = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Lines of every source file, by path relative to the root."""

    lines: dict[PurePosixPath, int]

    def over(self, limit: int) -> list[tuple[int, PurePosixPath]]:
        """Files of more than `limit` lines, longest first."""
        return sorted(((n, p) for p, n in self.lines.items() if n > limit), reverse=True)

    def by_folder(self) -> dict[PurePosixPath, list[PurePosixPath]]:
        """Files grouped by folder, at most three levels deep (src/paceline/kv, tests/unit/kv)."""
        groups: defaultdict[PurePosixPath, list[PurePosixPath]] = defaultdict(list)
        for path in sorted(self.lines):
            groups[PurePosixPath(*path.parent.parts[:3])].append(path)
        return dict(groups)


def measure(root: Path = ROOT) -> Sizes:
    """Count the lines of the sources under `root`."""
    lines = {}
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            if path.suffix in SUFFIXES and path.is_file():
                with path.open(encoding="utf-8") as file:
                    lines[PurePosixPath(path.relative_to(root).as_posix())] = sum(1 for _ in file)
    return Sizes(lines=lines)


def difference(base: str, root: Path = ROOT) -> dict[PurePosixPath, int]:
    """Lines added minus lines removed since `base`, by file; empty where git cannot say."""
    command = ["git", "-C", str(root), "diff", "--numstat", "--no-renames", base, "--", *FOLDERS]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        return {}
    changes = {}
    for line in ran.stdout.splitlines():
        added, removed, path = line.split("\t")
        if added != "-":  # a binary file
            changes[PurePosixPath(path)] = int(added) - int(removed)
    return changes


def table(sizes: Sizes, changes: dict[PurePosixPath, int]) -> str:
    """The table as text, folders in order, then the sum."""
    rows = [("folder", "files", "lines", "change", "longest file")]
    for folder, paths in sizes.by_folder().items():
        total = sum(sizes.lines[p] for p in paths)
        changed = sum(n for p, n in changes.items() if PurePosixPath(*p.parent.parts[:3]) == folder)
        longest = max(paths, key=lambda p: sizes.lines[p])
        rows.append(
            (
                str(folder),
                str(len(paths)),
                str(total),
                f"{changed:+d}" if changed else "",
                f"{sizes.lines[longest]} {longest.relative_to(folder)}",
            )
        )
    total = sum(sizes.lines.values())
    rows.append(("all", str(len(sizes.lines)), str(total), f"{sum(changes.values()):+d}", ""))
    return "\n".join(f"{a:<28}{b:>6}{c:>8}{d:>8}  {e}".rstrip() for a, b, c, d, e in rows)


def main() -> int:
    """Print the table; fail if a file is over the hard limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="HEAD~1", help="commit to compare with")
    base = parser.parse_args().base
    sizes = measure()
    print(table(sizes, difference(base)))
    for lines, path in sizes.over(SOFT):
        verdict = "over the hard limit: split it" if lines > HARD else "over the soft limit"
        print(f"{path}: {lines} lines, {verdict} ({SOFT} soft, {HARD} hard)")
    return 1 if sizes.over(HARD) else 0


if __name__ == "__main__":
    sys.exit(main())
