"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_test_says_what_it_protects() -> None:
    """A test whose purpose nobody knows is mended by deleting it."""
    silent = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("test_") and not ast.get_docstring(node):
                silent.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not silent, "tests without a docstring:\n" + "\n".join(silent)


def test_there_is_no_drawer_for_odds_and_ends() -> None:
    """A module is named after what it holds; `utils` is where structure goes to die."""
    drawers = {"utils", "util", "helpers", "common", "misc"}
    found = [p for p in (ROOT / "src").rglob("*") if p.stem in drawers]
    assert not found


def test_constraints_pin_the_version_of_everything_declared() -> None:
    """Two installations of one commit must be the same software."""
    import re
    import tomllib

    def name(requirement: str) -> str:
        return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=~! ]", requirement)[0]).lower()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = set(project["project"]["dependencies"]) | set(project["build-system"]["requires"])
    for extra in project["project"]["optional-dependencies"].values():
        declared |= set(extra)
    pinned = {
        name(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    assert {name(r) for r in declared} - {"paceline"} <= pinned
